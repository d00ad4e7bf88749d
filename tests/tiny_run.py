"""A run of the built-in task that takes seconds: the same phases and code as the quickstart, three digits."""

import functools
from pathlib import Path

import jax
import pytest

from vcppo_jax.config import Config
from vcppo_jax.config_load import load_config
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.rewards.score import Verdict
from vcppo_jax.run.processes import Shares
from vcppo_jax.sharding import make_mesh

YAML = """
phases: [sft, value, rl, evaluate]
model: {path: "builtin:tiny", init: random, compute_dtype: float32, remat: none}
mesh: {fsdp: 8}
data:
  train: task:running_sum
  max_prompt_tokens: 24
  task: {digits: 3, train_problems: 64, validation_problems: 8, demonstrations: 64}
rollout: {max_new_tokens: 12, batch_size: 32, n: 2}
sft: {batch_size: 16, steps: 4, learning_rate: 1.0e-3}
value: {steps: 4, prompts_per_step: 8, mini_batch_size: 8, held_out_prompts: 8, checkpoint_steps: [1]}
rl: {steps: 4, prompts_per_step: 8, mini_batch_size: 8, evaluate_every: 2}
actor: {learning_rate: 1.0e-3, warmup_steps: 8}
critic: {learning_rate: 1.0e-3, warmup_steps: 8}
evaluate: {samples_per_prompt: 2}
checkpoint: {every: 1, keep_last: 2}
logging: {tensorboard: false}
"""


def write_config(directory: Path) -> Path:
    """The YAML file of the tiny run, in `directory`."""
    file = directory / "tiny.yaml"
    file.write_text(f"run_dir: {directory / 'run'}\n{YAML}")
    return file


def tiny_config(directory: Path, *overrides: str) -> Config:
    """The tiny run's configuration; it writes to `directory`/run."""
    return load_config(write_config(directory), overrides)


def on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the test use the first device alone, whatever their mesh: a third of the time to compile."""
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}
    monkeypatch.setattr("vcppo_jax.phases.workspace.make_mesh", lambda _: make_mesh(sizes, jax.devices()[:1]))


@functools.cache
def whole_run(base: Path) -> Path:
    """`base`/whole, in whose `run` all phases of the tiny run have been run; once for all who ask."""
    directory = base / "whole"
    directory.mkdir()
    config = tiny_config(directory)
    assert run_phases(config, config.phases) == directory / "run" / "report.html"
    return directory


def judge_by_row(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """Of a rollout's rows every `period`th is right, the first one among them; the verifier still works."""
    results = Shares.results.func

    def by_row(self: Shares[Verdict]) -> list[Verdict]:
        count = len(results(self))
        return [Verdict(-1.0, "wrong") if row % period else Verdict(1.0, "correct") for row in range(count)]

    monkeypatch.setattr(Shares, "results", property(by_row))
