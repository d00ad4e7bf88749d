"""Combinations of keys from several sections that make no sense: each is refused with the key to change."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcppo_jax.config import Config

TASK_NAMES = ("running_sum", "alternating_sum")
GYM = "reasoning_gym/"
"""Before the name of one of reasoning-gym's tasks."""


def check_unread(config: Config) -> None:
    """Keys that are set to something else than their default, and that another key keeps from being read."""
    value, data = config.value, config.data
    sources = [source.strip() for source in f"{data.train},{data.validation or ''}".split(",")]
    tasks = {source.removeprefix("task:") for source in sources if source.startswith("task:")}
    if not config.rl.dynamic_sampling:
        _refuse_set(config, "rl.dynamic_sampling=true", "rl.dynamic_sampling_rounds")
    if config.algorithm.sft_coef == 0:
        _refuse_set(config, "algorithm.sft_coef above 0", "algorithm.sft_batch_size")
    if config.algorithm.kl_target is None:
        _refuse_set(config, "algorithm.kl_target", "algorithm.kl_horizon")
    # Not here: the kind of a KL whose coefficient is 0, and the value model's keys under an algorithm without
    # one. A preset sets the former, a file that several algorithms go over the latter.
    if not value.settle:
        tolerances = ("value.settle_loss_tolerance", "value.settle_variance_tolerance")
        _refuse_set(config, "value.settle=true", "value.settle_window", *tolerances)
    # With prompts of a file the task's keys may be those of the run that the file comes from.
    for name, key in (("running_sum", "digits"), ("alternating_sum", "additions")):
        if name not in tasks and tasks & set(TASK_NAMES):
            _refuse_set(config, f"data.train=task:{name}", f"data.task.{key}")
    if not config.logging.wandb:
        _refuse_set(config, "logging.wandb=true", "logging.wandb_project")


def _refuse_set(config: Config, needed: str, *keys: str) -> None:
    """ValueError for the first of the keys that is not at its default."""
    for key in keys:
        *sections, leaf = key.split(".")
        section = functools.reduce(getattr, sections, config)
        value, default = getattr(section, leaf), type(section).model_fields[leaf].default
        if value != default:
            raise ValueError(
                f"{key}={_shown(value)} needs {needed}; without it, leave {key} at {_shown(default)}"
            )


def _shown(value: object) -> object:
    """A value as it is written in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def check_model(config: Config) -> None:
    """Kernels that cannot compute in the type that is asked for."""
    if config.model.attention == "cudnn" and config.model.compute_dtype != "bfloat16":
        raise ValueError(
            f"model.attention=cudnn computes in 16 bits, got compute_dtype={config.model.compute_dtype}: set "
            "model.compute_dtype to bfloat16, or model.attention to auto or blocked"
        )


def check_rollout(config: Config) -> None:
    """Samples of a rounded policy."""
    if config.rollout.int8_weights and config.algorithm.importance_correction == "none":
        raise ValueError(
            "rollout.int8_weights=true samples from another policy than the one that is trained: set "
            "algorithm.importance_correction to token or sequence"
        )


def check_algorithm(config: Config) -> None:
    """What the estimator and the rewards need of the rollout."""
    algorithm, n = config.algorithm, config.rollout.n
    if algorithm.uses_group and n < 2:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} compares the samples of a prompt: set rollout.n to 2 "
            "or more"
        )
    if config.rl.dynamic_sampling and n < 2:
        raise ValueError("rl.dynamic_sampling compares the samples of a prompt: set rollout.n to 2 or more")

    samples = config.rl.prompts_per_step * n
    if algorithm.kl_target is not None and 0.2 * samples >= algorithm.kl_horizon:
        raise ValueError(
            f"algorithm.kl_horizon={algorithm.kl_horizon} is too short for steps of {samples} samples: the "
            f"coefficient could reach 0; set it above {int(0.2 * samples)}, better far above"
        )


def check_value_model(config: Config) -> None:
    """Where the value model starts, and whether there is one."""
    section, advantage = config.value_model, config.algorithm.advantage
    if advantage != "gae":
        if "value" in config.phases:
            raise ValueError(f"algorithm.advantage={advantage} has no value model: remove value from phases")
        if config.rl.critic_warmup_steps:
            raise ValueError(
                f"algorithm.advantage={advantage} has no value model: set rl.critic_warmup_steps to 0"
            )
    if section.step is not None:
        last = config.value.steps
        kept = sorted({step for step in config.value.checkpoint_steps if step < last} | {last})
        if "value" not in config.phases:
            raise ValueError(
                "value_model.step is a step of this run's value phase, which phases does not list"
            )
        if section.step not in kept:
            raise ValueError(
                f"value_model.step={section.step}: expected a step that is kept for ever, one of "
                f"{', '.join(map(str, kept))} (value.checkpoint_steps and the last)"
            )
    if section.init == "checkpoint" and section.path is None:
        raise ValueError("value_model.init=checkpoint needs value_model.path")
    if section.init == "reward_model" and section.path is None and "reward" not in config.phases:
        raise ValueError("value_model.init=reward_model needs value_model.path, or reward among the phases")
    if section.init == "policy" and section.path is not None:
        raise ValueError(
            "value_model.path is set but value_model.init=policy: set init to reward_model or checkpoint"
        )
    if config.rl.critic_warmup_steps >= config.rl.steps and config.rl.critic_warmup_steps:
        raise ValueError(
            f"rl.critic_warmup_steps={config.rl.critic_warmup_steps} leaves none of "
            f"rl.steps={config.rl.steps} for the policy"
        )


def check_settling(config: Config) -> None:
    """Value-pretraining that is to settle has the measurements for it."""
    section = config.value
    needed = (section.settle_window + 1) * section.held_out_every
    if section.settle and "value" in config.phases and needed >= section.steps:
        raise ValueError(
            f"value.settle=true can never stop before value.steps={section.steps}: it takes "
            f"value.settle_window + 1 measurements, {needed} steps; set value.steps above {needed}, or "
            "value.settle_window or value.held_out_every lower"
        )


def check_sizes(config: Config) -> None:
    """Batches that divide, rows that are long enough, lengths that are given once."""
    for name, training in (("sft", config.sft), ("reward_model", config.reward_model)):
        if training.steps is not None and training.epochs != 1:
            raise ValueError(f"{name}.epochs and {name}.steps both say how long: set one of them")
    for phase, section in (("value", config.value), ("rl", config.rl)):
        samples = section.prompts_per_step * config.rollout.n
        if phase in config.phases and samples % section.mini_batch_size:
            raise ValueError(
                f"{phase}.prompts_per_step x rollout.n = {samples} samples, which "
                f"{phase}.mini_batch_size={section.mini_batch_size} does not divide"
            )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.train.row_tokens is not None and config.train.row_tokens < longest:
        raise ValueError(
            f"train.row_tokens={config.train.row_tokens} is less than data.max_prompt_tokens + "
            f"rollout.max_new_tokens = {longest}"
        )


def check_data(config: Config) -> None:
    """Files that phases need where a built-in task does not write its own, and tasks that there are."""
    for source in (config.data.train, config.data.validation or ""):
        name = source.removeprefix("task:")
        if source.startswith("task:") and name not in TASK_NAMES and not name.startswith(GYM):
            raise ValueError(
                f"data: no task {name!r}; expected task:NAME with one of {', '.join(TASK_NAMES)}, or "
                f"task:{GYM}NAME"
            )
    has_own = config.data.train.startswith("task:")
    if "rl" in config.phases and config.rl.evaluate_every and not (has_own or config.data.validation):
        raise ValueError("rl.evaluate_every needs held-out problems: set data.validation, or it to 0")
    if has_own and not config.data.train.startswith(f"task:{GYM}"):
        return
    if config.sft.data is None and "sft" in config.phases:
        raise ValueError("sft.data: expected a file of demonstrations, or remove sft from phases")
    if config.sft.data is None and config.algorithm.sft_coef > 0:
        raise ValueError("algorithm.sft_coef mixes in demonstrations: set sft.data to a file of them")
    if config.reward_model.data is None and "reward" in config.phases:
        raise ValueError("reward_model.data: expected a file of pairs, or remove reward from phases")


CHECKS = (
    check_model,
    check_rollout,
    check_algorithm,
    check_value_model,
    check_settling,
    check_sizes,
    check_data,
    check_unread,
)
