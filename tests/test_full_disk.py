"""A disk without room: each write says in one line which file it was, and nothing hangs."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import resource
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from vcppo_jax.phases.artifacts import save_model_files
from vcppo_jax.phases.loop import write_json
from vcppo_jax.run.checkpoint_read import quiet_orbax
from vcppo_jax.run.files import WriteError
from vcppo_jax.run.metrics import StepLog, read_metrics
from vcppo_jax.run.progress import write_plain
from vcppo_jax.run.report import write_page

TOO_LARGE = r"File too large; make room"


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes; stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_program(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program of its own, for what threads and the interpreter print; it may take a minute."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# An event is twice as long as a line of metrics.jsonl. A writer that flushes fails at a step; one that does
# not, since 90 events are less than the 4 KiB that are held back, when it is closed.
TENSORBOARD = """
import resource, sys
sys.modules["torch"] = None  # tensorboardX would import it, for seconds
from vcppo_jax.run import tensorboard
from vcppo_jax.run.metrics import MetricsWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))
for name, tensorboard.FLUSH_S in (("step", 0.0), ("close", 1e6)):
    with MetricsWriter(f"{sys.argv[1]}/{name}", resume_step=None, tensorboard=True, wandb=None) as writer:
        for step in range(1, 91):
            writer.write(step, {"a": 1.0})
        print("written", file=sys.stderr)
    print("closed", file=sys.stderr)
"""


def test_a_run_goes_on_without_tensorboard(tmp_path):
    result = run_program(TENSORBOARD, tmp_path)
    assert result.returncode == 0, result.stderr
    said = [
        f"TensorBoard files in {tmp_path}/{name}/tensorboard cannot be written: File too large; "
        "metrics go on in metrics.jsonl"
        for name in ("step", "close")
    ]
    assert result.stderr.splitlines() == [said[0], "written", "closed", "written", said[1], "closed"]
    for name in ("step", "close"):
        assert len(read_metrics(tmp_path / name)) == 90


CHECKPOINT = """
import gc, resource, sys, time
import numpy as np
from vcppo_jax.run.checkpoint import Checkpoints

numbers = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
state = {f"w{index}": numbers + index for index in range(60)}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for step in (1, 2, 3):
    try:
        with Checkpoints(sys.argv[1], keep_last=1) as checkpoints:
            checkpoints.save(step, state, {})
    except Exception as error:
        print(error, file=sys.stderr)
gc.collect()  # tasks that nobody waited for are reported by then
time.sleep(0.2)  # and writes that end too late
"""


def test_a_checkpoint_that_cannot_be_saved_is_one_line(tmp_path):
    result = run_program(CHECKPOINT, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 3, result.stderr
    for step, line in enumerate(lines, start=1):
        assert line.startswith(f"checkpoints: step {step} could not be saved to {tmp_path}: File too large; ")


async def orbax_fails():
    raise OSError("a write of Orbax")


async def another_fails():
    raise OSError("another task")


def test_only_tasks_of_orbax_are_left_out_of_asyncios_log(caplog):
    quiet_orbax()
    elsewhere = orbax_fails.__code__.replace(co_filename="site-packages/orbax/checkpoint/serialization.py")
    in_orbax = types.FunctionType(elsewhere, {})

    async def forget(function):
        task = asyncio.ensure_future(function())
        await asyncio.sleep(0)
        del task

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for function in (in_orbax, another_fails):
            asyncio.run(forget(function))
    assert [str(record.exc_info[1]) for record in caplog.records] == ["another task"]


def test_only_late_wakeups_are_left_out_of_unraisable_errors(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    quiet_orbax()
    loop = asyncio.new_event_loop()
    loop.close()
    from_outside = functools.partial(loop.call_soon_threadsafe, print)  # as from C++, without a frame here

    def report(call, of=None):
        try:
            call()
        except RuntimeError as error:
            sys.unraisablehook(
                types.SimpleNamespace(exc_value=error, exc_traceback=error.__traceback__.tb_next, object=of)
            )

    report(from_outside)
    assert seen == []
    report(from_outside, of=print)
    report(lambda: from_outside())  # some other code that uses a closed loop
    report(functools.partial(loop.run_until_complete, loop))
    assert len(seen) == 3


def test_a_line_that_does_not_fit(tmp_path):
    log = StepLog(tmp_path / "metrics.jsonl", resume_step=None)
    log.append({"step": 1, "a": 0.5})
    with file_limit(40), pytest.raises(WriteError, match=rf"metrics\.jsonl: cannot be written: {TOO_LARGE}"):
        log.append({"step": 2, "a": "b" * 40})
    log.close()
    log = StepLog(log.path, resume_step=2)
    log.append({"step": 2, "a": 0.25})
    log.close()
    assert read_metrics(log.path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25}]


def test_a_copy_that_does_not_fit_names_the_copy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(" " * 100)
    target = tmp_path / "sft" / "model" / "config.json"
    with file_limit(40), pytest.raises(WriteError, match=rf"^{target}: cannot be written: {TOO_LARGE}"):
        save_model_files(tmp_path / "sft", "actor", tmp_path / "model", {})


def test_a_file_that_is_written_whole_stays_as_it_was(tmp_path):
    file = tmp_path / "summary.json"
    write_json(file, {"old": 1})
    with file_limit(40), pytest.raises(WriteError, match=rf"summary\.json: cannot be written: {TOO_LARGE}"):
        write_json(file, {"new": "b" * 40})
    assert json.loads(file.read_text()) == {"old": 1}


def test_a_page_that_does_not_fit(tmp_path):
    page = {"title": "t" * 50, "progress": "", "troubles": [], "columns": [], "tables": [], "figures": []}
    with file_limit(40), pytest.raises(WriteError, match=rf"study\.md: cannot be written: {TOO_LARGE}"):
        write_page(tmp_path / "study.md", "study.md.j2", footnote="", **page)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_output_to_a_full_disk():
    said = ""
    with suppress(OSError), open("/dev/full", "w", encoding="utf-8") as file:  # it fails again when closed
        try:
            write_plain(file, "a line")
        except WriteError as error:
            said = str(error)
    assert said.startswith("/dev/full: cannot be written: No space left on device; make room")
