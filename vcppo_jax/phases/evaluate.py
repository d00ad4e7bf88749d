"""Evaluation on held-out problems: mean@k and best@k per source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.prompts import PromptRecord
from vcppo_jax.models.networks import Policy
from vcppo_jax.phases.collect import ScoredRollout, collect
from vcppo_jax.phases.loop import Metrics, Timer
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.rollout.sampling import Sampling
from vcppo_jax.run.metrics import MetricsWriter, StepLog, WandbSettings
from vcppo_jax.run.processes import from_main, is_main


def evaluation_sampling(workspace: Workspace) -> Sampling:
    """How evaluation samples."""
    section, limit = workspace.config.evaluate, workspace.config.evaluate.max_new_tokens
    return Sampling(
        max_new_tokens=workspace.config.rollout.max_new_tokens if limit is None else limit,
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        n=section.samples_per_prompt,
    )


def evaluate_policy(
    workspace: Workspace,
    policy: Policy,
    records: list[PromptRecord],
    *,
    key: jax.Array,
    interruptible: bool = False,
) -> tuple[Metrics, list[dict[str, Any]]]:
    """(metrics, sample responses) of a policy on `records`; ({}, []) without records.

    Per source: `val-core/<source>/acc/mean@k`, the mean accuracy of k samples, and with k > 1
    `val-aux/<source>/acc/best@k`, the share of problems that one of k samples solves.
    """
    sampling, limit = evaluation_sampling(workspace), workspace.config.evaluate.max_prompts
    # All are sampled before the first verdict is waited for: the verifier works beside the device.
    rollouts = {
        source: collect(
            workspace,
            policy,
            [record for record in records if record.source == source][:limit],
            sampling=sampling,
            key=key,
            timer=Timer(),
            interruptible=interruptible,
        )
        for source in sorted({record.source for record in records})
    }
    metrics: Metrics = {}
    examples: list[dict[str, Any]] = []
    for source, rollout in rollouts.items():
        metrics |= source_metrics(source, rollout, sampling.n)
        examples += rollout.examples(max(1, workspace.config.logging.samples_per_step))
    return metrics, examples


def source_metrics(source: str, rollout: ScoredRollout, k: int) -> Metrics:
    """The metrics of one source, from k adjacent samples per problem."""
    right = (rollout.scores > 0).reshape(-1, k)
    row: Metrics = {f"val-core/{source}/acc/mean@{k}": float(right.mean())}
    if k > 1:
        row[f"val-aux/{source}/acc/best@{k}"] = float(right.any(axis=1).mean())
    row[f"val-aux/{source}/response_length/mean"] = float(rollout.samples.lengths.mean())
    row[f"val-aux/{source}/response_length/clip_ratio"] = float(rollout.truncated.mean())
    return row


def accuracy(metrics: Metrics) -> float | None:
    """The mean over sources of `val-core/*/acc/mean@k`; None where there is none."""
    found = [
        value for name, value in metrics.items() if name.startswith("val-core/") and "/acc/mean@" in name
    ]
    return float(np.mean(found)) if found else None


def mean_length(metrics: Metrics) -> float | None:
    """The mean over sources of the held-out response length; None where there is none."""
    found = [value for name, value in metrics.items() if name.endswith("/response_length/mean")]
    return float(np.mean(found)) if found else None


def last_policy(workspace: Workspace) -> tuple[Policy, str]:
    """The run's last policy, and which it is: RL's, else the cold start's, else that of `model.path`."""

    def trained() -> str | None:
        for phase in ("rl", "sft"):
            steps = (workspace.run_dir / phase / "checkpoints").glob("*")
            if any(step.name.isdigit() for step in steps):
                return phase
        return None

    phase = from_main(trained)
    if phase is None:
        return workspace.base_policy(), workspace.config.model.path
    return workspace.load_policy(workspace.run_dir / phase), phase


def run(workspace: Workspace) -> None:
    """Evaluate the run's last policy on held-out problems."""
    records = workspace.records("validation")
    if not records:
        raise ConfigError("data.validation: evaluation needs held-out problems; set it to a file")
    policy, name = last_policy(workspace)
    phase_dir = workspace.begin("evaluate")
    workspace.progress.start("evaluate", 1)
    timer = Timer()
    metrics, examples = evaluate_policy(
        workspace, policy, records, key=workspace.key("evaluate"), interruptible=True
    )
    if is_main():
        _write(workspace, phase_dir, metrics | timer.metrics(), examples)
    workspace.progress.update(1, metrics)
    workspace.finish("evaluate", {"policy": name, **metrics})


def _write(workspace: Workspace, phase_dir: Path, metrics: Metrics, examples: list[dict[str, Any]]) -> None:
    """Metrics and sample responses."""
    config = workspace.config
    samples = StepLog(phase_dir / "samples.jsonl", resume_step=None)
    for example in examples:
        samples.append({"step": 0, **example})
    samples.close()
    wandb = None
    if config.logging.wandb:
        shown = f"{workspace.run_dir.name}/evaluate"
        wandb = WandbSettings(config.logging.wandb_project, shown, config.model_dump(mode="json"))
    with MetricsWriter(
        phase_dir, resume_step=None, tensorboard=config.logging.tensorboard, wandb=wandb
    ) as writer:
        writer.write(0, metrics)
