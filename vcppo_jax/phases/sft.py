"""SFT cold start: imitate demonstrations of `<think>...</think>` and the boxed answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vcppo_jax.data.prompts import RecordStream, SFTExample
from vcppo_jax.models.networks import Policy
from vcppo_jax.models.specs import weight_specs
from vcppo_jax.phases.artifacts import save_model_files
from vcppo_jax.phases.evaluate import evaluate_policy
from vcppo_jax.phases.loop import Meta, StepResult, Timer, mean_infos
from vcppo_jax.phases.networks import learner
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.train.minibatches import Samples, mini_batches
from vcppo_jax.train.objectives import SFTObjective


def demonstration_samples(workspace: Workspace, examples: Sequence[SFTExample]) -> Samples:
    """Demonstrations as prompts with responses, [B, rollout.max_new_tokens]."""
    max_tokens = workspace.config.rollout.max_new_tokens
    responses = np.zeros((len(examples), max_tokens), np.int32)
    for row, example in zip(responses, examples):
        row[: len(example.response_ids)] = example.response_ids
    return Samples(
        [example.prompt_ids for example in examples],
        responses,
        np.asarray([len(example.response_ids) for example in examples]),
        lambda count: workspace.shape_for(max_tokens, count),
    )


def run(workspace: Workspace) -> None:
    """Train the policy of `model.path` on demonstrations, then evaluate it on held-out problems."""
    config = workspace.config
    section = config.sft
    phase_dir = workspace.begin("sft")
    policy = workspace.base_policy()
    stream = RecordStream(workspace.demonstrations(), seed=config.seed)
    steps = section.steps
    if steps is None:
        steps = section.epochs * math.ceil(len(stream) / section.batch_size)
    actor = learner(
        config,
        workspace.mesh,
        "policy",
        weight_specs(policy.config, head="lm"),
        SFTObjective(policy.config),
        section,
        updates=steps,
        say=workspace.progress.message,
        layout=config.mesh.layout.actor,
    )
    save_model_files(phase_dir, "actor", workspace.model_dir, {})

    def step_function(step: int, state: Any, meta: Meta) -> StepResult:
        timer = Timer()
        examples = stream.take((step - 1) * section.batch_size, section.batch_size)
        with timer("update"):
            batches = mini_batches(
                demonstration_samples(workspace, examples),
                {},
                epochs=1,
                mini_batch_size=section.batch_size,
                aggregation="token-mean",
                norm_length=config.rollout.max_new_tokens,
                seed=(config.seed, step),
            )
            actor_state, infos = actor.steps(state["actor"], batches, f"sft step {step}")
        metrics = {"sft/loss": infos[0]["loss"]} | mean_infos(infos, "sft/") | timer.metrics()
        return StepResult({"actor": actor_state}, meta, metrics, best_metric=-infos[0]["loss"])

    state, _, done = workspace.loop("sft", steps).run(
        lambda: {"actor": actor.new_state(policy.params)}, {"actor": actor.abstract_state}, step_function
    )
    trained = Policy(state["actor"].params, policy.config)
    summary, _ = evaluate_policy(
        workspace, trained, workspace.records("validation"), key=workspace.key("sft"), interruptible=True
    )
    workspace.finish("sft", {"steps": done, **summary})
