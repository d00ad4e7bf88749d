"""Many processes on localhost, two devices each: one trajectory, one set of files, and one end for all.

What takes minutes carries the marker `processes`: `pytest -m processes -n0 tests/test_processes.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from vcppo_jax.run.checkpoint import read_params
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.run.peers import LOST

CONFIG = """
phases: [sft, value, rl, evaluate]
model: {path: "builtin:tiny", init: random, compute_dtype: float32, remat: none}
mesh: {fsdp: -1}
data:
  train: task:running_sum
  max_prompt_tokens: 20
  task: {digits: 3, train_problems: 16, validation_problems: 4, demonstrations: 8}
rollout: {max_new_tokens: 12, batch_size: 8, n: 2}
sft: {batch_size: 8, steps: 2, learning_rate: 1.0e-3}
value: {steps: 4, prompts_per_step: 4, mini_batch_size: 8, held_out_prompts: 4, held_out_every: 2}
rl: {steps: 6, prompts_per_step: 4, mini_batch_size: 8}
actor: {learning_rate: 1.0e-3, eps: 1.0e-5}
critic: {learning_rate: 1.0e-3, eps: 1.0e-5}
evaluate: {top_p: 1.0, samples_per_prompt: 2}
checkpoint: {every: 1, keep_last: 2}
logging: {tensorboard: false}
"""
SHORT = ("sft.steps=1", "value.steps=1", "value.held_out_every=1", "rl.steps=2")
SAMPLES = 8  # of every rollout: prompts x n
TIME_LIMIT_S = 280


class Job:
    """`count` processes of one job, `devices` each, that write to `directory`/run."""

    def __init__(self, directory: Path, count: int, *overrides: str, devices: int = 2) -> None:
        self.directory, self.count = directory, count
        self.run = directory / "run"
        self.notes = [directory / f"notes{i}" for i in range(count)]
        self.outputs = [directory / f"output{i}" for i in range(count)]
        config = directory / "job.yaml"
        config.write_text(f"run_dir: {self.run}\n{CONFIG}")
        command = [sys.executable, "-u", str(Path(__file__).with_name("process_main.py")), "run", str(config)]
        if count > 1:
            command += ["--distributed", "--join-timeout", "120"]
        address = free_address()
        self.processes = [
            subprocess.Popen(
                [*command, *overrides],
                stdout=self.outputs[i].open("w"),
                stderr=subprocess.STDOUT,
                env=environment(i, count, devices, address) | {"NOTES": str(self.notes[i])},
            )
            for i in range(count)
        ]

    def wait(self) -> list[int]:
        """The exit status of each process; what still runs at the end of the time is killed."""
        until = time.monotonic() + TIME_LIMIT_S
        try:
            return [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def await_checkpoint(self, phase: str, step: int) -> None:
        """Return once the phase has saved `step` or a later one."""
        until = time.monotonic() + TIME_LIMIT_S
        steps = self.run / phase / "checkpoints"
        while not any(int(p.name) >= step for p in steps.glob("*") if p.name.isdigit()):
            assert time.monotonic() < until, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.02)

    def output(self, index: int) -> list[str]:
        """What a process printed, without what gloo prints when it connects."""
        lines = self.outputs[index].read_text(errors="replace").splitlines()
        return [line for line in lines if "Gloo" not in line and "peer ranks" not in line]

    def said(self) -> str:
        """What all of them printed."""
        return "\n".join(f"{i}: {line}" for i in range(self.count) for line in self.output(i))

    def noted(self, index: int, kind: str) -> list[list]:
        lines = self.notes[index].read_text().splitlines()
        return [note[1:] for note in map(json.loads, lines) if note[0] == kind]


def free_address() -> str:
    """An address on this host that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def environment(index: int, count: int, devices: int, address: str) -> dict[str, str]:
    """The environment of a process with so many virtual devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    ours = {"XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])}
    if count > 1:
        ours |= {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
    return dict(os.environ) | ours


def arrays(run: Path) -> dict[str, np.ndarray]:
    """What the last checkpoints of all phases hold, by name."""
    found = {}
    for phase, network in (("sft", "actor"), ("value", "critic"), ("rl", "actor"), ("rl", "critic")):
        tree = read_params(run / phase / "checkpoints", subtree=network)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[f"{phase} {network}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    return found


def check_one_run(job: Job) -> None:
    """The processes did the same steps, saw the same numbers, and shared the work; one of them wrote."""
    steps = job.noted(0, "step")
    phases = [phase for phase, *_ in steps]
    assert sorted(set(phases)) == ["rl", "sft", "value"], job.said()
    for index in range(1, job.count):
        assert job.noted(index, "step") == steps, "metrics are global"
        assert job.output(index) == []
    verified = [[count for (count,) in job.noted(i, "verified")] for i in range(job.count)]
    rollouts = len(verified[0])
    assert [sum(counts) for counts in zip(*verified, strict=True)] == [SAMPLES] * rollouts
    assert {count for counts in verified for count in counts} == {SAMPLES // job.count}
    written = [
        (phase, row["step"]) for phase in ("sft", "value", "rl") for row in read_metrics(job.run / phase)
    ]
    assert written == [(phase, step) for phase, step, _ in steps], "one line a step"
    assert "report: " in job.output(0)[-1]
    assert (job.run / "report.html").is_file()
    assert json.loads((job.run / "evaluate" / "summary.json").read_text())["finished"]


def test_two_processes_run_all_phases_as_one(tmp_path):
    job = Job(tmp_path, 2, *SHORT)
    assert job.wait() == [0, 0], job.said()
    check_one_run(job)
    assert all(np.isfinite(x).all() for x in arrays(job.run).values())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("two"), 2)
    assert job.wait() == [0, 0], job.said()
    return job


def assert_near(job: Job, other: Job) -> None:
    ours, theirs = arrays(job.run), arrays(other.run)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_allclose(x, theirs[name], atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.processes
def test_two_processes_of_two_devices_are_one_of_four(tmp_path, uninterrupted):
    check_one_run(uninterrupted)
    alone = Job(tmp_path, 1, devices=4)
    assert alone.wait() == [0], alone.said()
    assert_near(uninterrupted, alone)


@pytest.mark.processes
def test_four_processes_of_two_devices_are_one_of_eight(tmp_path):
    directories = [tmp_path / "four", tmp_path / "one"]
    for directory in directories:
        directory.mkdir()
    four = Job(directories[0], 4, *SHORT)
    assert four.wait() == [0] * 4, four.said()
    check_one_run(four)
    alone = Job(directories[1], 1, *SHORT, devices=8)
    assert alone.wait() == [0], alone.said()
    assert_near(four, alone)


@pytest.mark.processes
def test_a_process_that_dies_or_is_told_to_stop_ends_the_job_and_it_resumes(tmp_path, uninterrupted):
    job = Job(tmp_path, 2)
    job.await_checkpoint("value", 1)
    job.processes[1].send_signal(signal.SIGTERM)  # to one of them alone, as when one host is preempted
    assert job.wait() == [128 + signal.SIGTERM] * 2, job.said()
    assert "SIGTERM: " in job.output(0)[-1]

    job = Job(tmp_path, 2)
    job.await_checkpoint("rl", 1)
    killed = time.monotonic()
    job.processes[1].kill()
    status = job.processes[0].wait(60)
    assert time.monotonic() - killed < 60
    assert status == LOST, job.said()
    assert any("process 1 (" in line and "was lost" in line for line in job.output(0)), job.said()

    job = Job(tmp_path, 2)
    assert job.wait() == [0, 0], job.said()
    assert "rl: resumed after step" in job.said()
    ours, theirs = arrays(job.run), arrays(uninterrupted.run)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


@pytest.mark.processes
def test_when_process_0_dies_the_others_say_so(tmp_path):
    job = Job(tmp_path, 2, *SHORT)
    job.await_checkpoint("sft", 1)
    job.processes[0].kill()
    assert job.processes[1].wait(60) == LOST, job.said()
    assert any("process 0 (" in line and "was lost" in line for line in job.output(1)), job.said()
