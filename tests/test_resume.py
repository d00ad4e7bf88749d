"""An interrupted run that goes on equals one that never stopped, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import tiny_config, write_config

from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.run.checkpoint import read_params

OVERRIDES = ("phases=[rl]", "rl.steps=12", "rl.evaluate_every=0", "mesh.fsdp=1")
VARYING = ("timing_s/", "perf/throughput")


def start(directory: Path, cache: Path) -> subprocess.Popen:
    """`vcppo run` of the tiny run in a process of its own."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "XLA_FLAGS": ""}
    command = [sys.executable, "-u", "-m", "vcppo_jax.cli", "run", str(write_config(directory)), *OVERRIDES]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    return output


def wait_for_checkpoint(directory: Path, step: int, process: subprocess.Popen) -> None:
    """Return once a checkpoint of `step` or later is there: it is written behind the steps."""
    saved = directory / "run" / "rl" / "checkpoints"
    deadline = time.monotonic() + 240
    while not any(p.name.isdigit() and int(p.name) >= step for p in saved.glob("*")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def outcome(directory: Path) -> tuple[dict, list[dict]]:
    """(every array of the last checkpoint, the metrics that do not measure time)."""
    run = directory / "run" / "rl"
    arrays = {}
    for part in ("actor", "critic"):
        tree = read_params(run / "checkpoints" / "12", subtree=part)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[part + jax.tree_util.keystr(path)] = np.asarray(leaf)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in line.items() if not k.startswith(VARYING)} for line in lines]


def assert_same(directory: Path, reference: tuple[dict, list[dict]]) -> None:
    arrays, metrics = outcome(directory)
    assert arrays.keys() == reference[0].keys()
    assert [name for name, x in arrays.items() if x.tobytes() != reference[0][name].tobytes()] == []
    assert metrics == reference[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache):
    directory = tmp_path_factory.mktemp("uninterrupted")
    process = start(directory, cache)
    output = finish(process)
    assert process.returncode == 0, output
    return outcome(directory)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, cache, reference, sent):
    process = start(tmp_path, cache)
    wait_for_checkpoint(tmp_path, 2, process)
    process.send_signal(sent)
    output = finish(process)
    assert process.returncode == (-sent if sent == signal.SIGKILL else 128 + sent), output
    if sent != signal.SIGKILL:
        assert "is saved in" in output
    process = start(tmp_path, cache)
    output = finish(process)
    assert process.returncode == 0, output
    assert "rl: resumed after step" in output
    assert_same(tmp_path, reference)


def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, capsys):
    config = tiny_config(tmp_path, *OVERRIDES, "mesh.fsdp=8")
    run_phases(config, ("rl",))
    before = outcome(tmp_path)
    run = tmp_path / "run" / "rl"
    (run / "summary.json").unlink()
    largest = max((run / "checkpoints" / "12").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    capsys.readouterr()
    run_phases(config, ("rl",))
    output = capsys.readouterr().out
    assert "damaged" in output
    assert "rl: resumed after step 11" in output
    assert_same(tmp_path, before)
