"""Builds the networks of a run from its config: objectives, optimizers, starting weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from jax.sharding import Mesh

from vcppo_jax.config import Config, OptimizerSection
from vcppo_jax.config_load import ConfigError
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.networks import Policy, ValueModel
from vcppo_jax.models.specs import weight_specs
from vcppo_jax.phases.artifacts import (
    check_tokenizer,
    find_model,
    value_model_and_origin,
    value_model_from_policy,
)
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.run.checkpoint_read import newest_meta
from vcppo_jax.run.processes import from_main
from vcppo_jax.train.learner import Learner
from vcppo_jax.train.objectives import PolicyObjective, ValueObjective
from vcppo_jax.train.optimizer import learning_rate_schedule, make_optimizer
from vcppo_jax.train.updates import LossFunction

Say = Callable[[str], None]
"""Where a line for the user goes."""


def learner(
    config: Config,
    mesh: Mesh,
    name: str,
    specs: Any,
    objective: LossFunction,
    section: OptimizerSection,
    *,
    updates: int,
    say: Say,
    layout: str,
    learning_rate: float | None = None,
) -> Learner:
    """A network with the optimizer of its config section; its schedule ends after `updates`.

    `say` is told where that is before the end of the warm-up.
    """
    if section.warmup_steps > updates:
        say(
            f"{name}: warmup_steps={section.warmup_steps} is more than the phase has updates, {updates}: "
            "the learning rate does not come to its peak"
        )
    schedule = learning_rate_schedule(
        learning_rate=section.learning_rate if learning_rate is None else learning_rate,
        warmup_steps=section.warmup_steps,
        schedule=section.schedule,
        updates=updates,
    )
    optimizer = make_optimizer(
        schedule,
        beta1=section.beta1,
        beta2=section.beta2,
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )
    return Learner(
        name,
        specs,
        objective,
        optimizer,
        mesh,
        max_skipped=config.train.max_skipped_updates,
        layout=layout,
    )


def updates_in(steps: int, samples: int, mini_batch_size: int, epochs: int) -> int:
    """Updates that `steps` steps make."""
    return steps * epochs * math.ceil(samples / mini_batch_size)


def actor_objective(config: Config, model: ModelConfig) -> PolicyObjective:
    """What the policy is trained on in RL."""
    algorithm = config.algorithm
    return PolicyObjective(
        config=model,
        temperature=config.rollout.temperature,
        policy_loss=algorithm.policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        importance=algorithm.importance_correction != "none",
        kl_kind=algorithm.kl_kind if algorithm.kl_coef > 0 and algorithm.kl_in != "reward" else None,
        entropy_coef=algorithm.entropy_coef,
        positive_nll_coef=algorithm.positive_nll_coef,
        sft_coef=algorithm.sft_coef,
    )


def actor_learner(config: Config, mesh: Mesh, model: ModelConfig, say: Say) -> Learner:
    """The policy in RL."""
    samples = config.rl.prompts_per_step * config.rollout.n
    steps = config.rl.steps - config.rl.critic_warmup_steps
    updates = updates_in(steps, samples, config.rl.mini_batch_size, config.actor.epochs)
    specs = weight_specs(model, head="lm")
    return learner(
        config,
        mesh,
        "actor",
        specs,
        actor_objective(config, model),
        config.actor,
        updates=updates,
        say=say,
        layout=config.mesh.layout.actor,
    )


def critic_learner(
    config: Config, mesh: Mesh, value_model: ModelConfig, say: Say, *, head_bias: bool, phase: str
) -> Learner:
    """The value model in value-pretraining ("value") or RL ("rl")."""
    section = config.value if phase == "value" else config.rl
    samples = section.prompts_per_step * config.rollout.n
    return learner(
        config,
        mesh,
        "critic",
        weight_specs(value_model, head="value", head_bias=head_bias),
        ValueObjective(config=value_model, clip=config.algorithm.value_clip),
        config.critic,
        updates=updates_in(section.steps, samples, section.mini_batch_size, config.critic.epochs),
        say=say,
        layout=config.mesh.layout.critic,
        learning_rate=config.value.learning_rate if phase == "value" else None,
    )


def starting_value_model(workspace: Workspace, policy: Policy, phase: str) -> tuple[ValueModel, str]:
    """(value model, where it comes from) that `phase` starts with; see config's value_model.init.

    Raises ConfigError where the phase that it should come from is not finished or had other rewards, and
    where its tokenizer is not the policy's.
    """
    config, section = workspace.config, workspace.config.value_model
    path, layout = value_model_path(workspace, phase), workspace.config.mesh.layout.critic
    if path is None:
        return value_model_from_policy(policy, workspace.mesh, layout=layout, head_bias=section.head_bias)
    source = find_model(path, "critic")
    check_tokenizer(path, source.model_dir, workspace.tokenizer)
    return value_model_and_origin(
        path,
        compute_dtype=config.model.compute_dtype,
        remat=config.model.remat,
        attention=config.model.attention,
        mesh=workspace.mesh,
        layout=layout,
        head_bias=section.head_bias,
    )


def value_model_path(workspace: Workspace, phase: str) -> Path | None:
    """Where the value model that `phase` starts with is read from; None for the policy's weights."""
    return from_main(lambda: _value_model_path(workspace, phase))


def _value_model_path(workspace: Workspace, phase: str) -> Path | None:
    config, section = workspace.config, workspace.config.value_model
    if phase == "rl" and "value" in config.phases:
        directory = workspace.run_dir / "value"
        _require_same_rewards(workspace, directory)
        if section.step is not None:
            return directory / "checkpoints" / str(section.step)
        if not (directory / "summary.json").is_file():
            raise ConfigError(
                f"phases lists value, but {directory} holds no finished value-pretraining; run `vcppo value` "
                "with this config first, set value_model.step, or set phases without value"
            )
        return directory
    if section.init == "policy":
        return None
    if section.path is not None:
        return Path(section.path)
    directory = workspace.run_dir / "reward"
    if not (directory / "summary.json").is_file():
        raise ConfigError(
            f"value_model.init=reward_model, but {directory} holds no finished reward model; run "
            "`vcppo reward` with this config first, or set value_model.path"
        )
    return directory


def value_model_dir(workspace: Workspace, phase: str) -> Path:
    """The directory whose config.json and tokenizer the value model of `phase` has."""
    path = value_model_path(workspace, phase)
    return workspace.model_dir if path is None else find_model(path, "critic").model_dir


def _require_same_rewards(workspace: Workspace, directory: Path) -> None:
    file = directory / "config.yaml"
    if not file.is_file():
        return  # `find_model` says that there is nothing
    theirs = yaml.safe_load(file.read_text(encoding="utf-8"))["reward"]
    ours = workspace.config.reward.model_dump(mode="json")
    if changed := [f"reward.{key}" for key in ours if ours[key] != theirs.get(key)]:
        raise ConfigError(
            f"{directory}: its value model learned from other rewards ({', '.join(changed)}); restore them, "
            "or choose another run_dir"
        )


def starting_moments(workspace: Workspace, phase: str) -> list[float] | None:
    """The reward moments in the checkpoint of the value model that `phase` starts with; None without any."""
    if workspace.config.reward.normalize != "running" or workspace.config.algorithm.advantage != "gae":
        return None
    path = value_model_path(workspace, phase)
    checkpoint = None if path is None else find_model(path, "critic").checkpoint
    return None if checkpoint is None else newest_meta(checkpoint).get("reward_moments")
