"""An interrupted run that goes on equals one that never stopped, bit for bit, in every phase."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from tiny_run import tiny_config, whole_run, write_config

from vcppo_jax.cli import main
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.run.checkpoint import read_params
from vcppo_jax.run.checkpoint_read import read_meta

STEPS = 4
NETWORKS = {"sft": ("actor",), "value": ("critic",), "rl": ("actor", "critic")}
VARYING = ("timing_s/", "perf/throughput")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return whole_run(tmp_path_factory.getbasetemp())


def start(directory: Path) -> subprocess.Popen:
    """`vcppo run` of the tiny run in a process of its own, with as many devices as this one."""
    command = [sys.executable, "-u", "-m", "vcppo_jax.cli", "run", str(write_config(directory))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def has_checkpoint(directory: Path, phase: str) -> bool:
    """Whether a checkpoint is there: the first one appears while the second step runs."""
    return any(p.name.isdigit() for p in (directory / "run" / phase / "checkpoints").glob("*"))


def stop(process: subprocess.Popen, sent: signal.Signals, directory: Path, phase: str) -> str:
    """What a process printed that was sent a signal once the phase's first checkpoint was there."""
    deadline = time.monotonic() + 240
    while not has_checkpoint(directory, phase):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    return process.communicate(timeout=240)[0]


def interrupt_this_process(directory: Path, phase: str, over: threading.Event) -> threading.Thread:
    """A thread that sends SIGINT to this process once the phase's first checkpoint is there."""

    def watch() -> None:
        while not over.wait(0.01):
            if has_checkpoint(directory, phase):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def finished_phases(directory: Path) -> list[str]:
    return [phase for phase in NETWORKS if (directory / "run" / phase / "summary.json").exists()]


def outcome(directory: Path, phase: str) -> tuple[dict[str, np.ndarray], dict, list[dict], dict]:
    """(arrays and meta of the last checkpoint, metrics that do not measure time, summary without paths)."""
    run = directory / "run" / phase
    arrays = {}
    for network in NETWORKS[phase]:
        tree = read_params(run / "checkpoints" / str(STEPS), subtree=network)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[network + jax.tree_util.keystr(path)] = np.asarray(leaf)
    meta = read_meta(epath.Path(run / "checkpoints" / str(STEPS)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(VARYING)} for line in lines]
    summary = json.loads((run / "summary.json").read_text())
    return arrays, meta, metrics, {k: v for k, v in summary.items() if k != "origin"}


def assert_same(directory: Path, reference: Path, phase: str) -> None:
    arrays, *rest = outcome(directory, phase)
    expected, *expected_rest = outcome(reference, phase)
    assert arrays.keys() == expected.keys()
    for part in ("params", "opt_state", "updates"):
        assert any(part in name for name in arrays), part
    assert [name for name, x in arrays.items() if x.tobytes() != expected[name].tobytes()] == []
    assert rest == expected_rest


def test_a_run_stopped_in_every_phase_ends_as_one_that_never_stopped(tmp_path, uninterrupted, capsys):
    process = start(tmp_path)
    output = stop(process, signal.SIGKILL, tmp_path, "sft")
    assert process.returncode == -signal.SIGKILL, output
    assert finished_phases(tmp_path) == []

    process = start(tmp_path)
    output = stop(process, signal.SIGTERM, tmp_path, "value")
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "sft: resumed after step" in output
    assert "value: SIGTERM: step" in output
    assert finished_phases(tmp_path) == ["sft"]

    over = threading.Event()
    watcher = interrupt_this_process(tmp_path, "rl", over)
    try:
        status = main(["run", str(write_config(tmp_path))])
    finally:
        over.set()
        watcher.join()
    output = capsys.readouterr().out
    assert status == 128 + signal.SIGINT, output
    assert "value: resumed after step" in output
    assert "rl: SIGINT: step" in output
    assert finished_phases(tmp_path) == ["sft", "value"]

    assert main(["run", str(write_config(tmp_path))]) == 0
    assert "rl: resumed after step" in capsys.readouterr().out
    for phase in NETWORKS:
        assert_same(tmp_path, uninterrupted, phase)


def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, uninterrupted, capsys):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    run = tmp_path / "run" / "rl"
    (run / "summary.json").unlink()
    largest = max((run / "checkpoints" / str(STEPS)).rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    capsys.readouterr()
    run_phases(tiny_config(tmp_path), ("rl",))
    output = capsys.readouterr().out
    assert f"checkpoint {STEPS} is damaged" in output
    assert f"rl: resumed after step {STEPS - 1}" in output
    assert_same(tmp_path, uninterrupted, "rl")
