"""Combinations of keys from several sections that make no sense: each is refused with the key to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcppo_jax.config import Config


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
    if not config.rl.dynamic_sampling and config.rl.dynamic_sampling_rounds != 10:
        raise ValueError("rl.dynamic_sampling_rounds needs rl.dynamic_sampling=true")
    if config.algorithm.sft_coef == 0 and config.algorithm.sft_batch_size != 16:
        raise ValueError("algorithm.sft_batch_size needs algorithm.sft_coef above 0")


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


def check_sizes(config: Config) -> None:
    """Batches that divide, rows that are long enough."""
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
    """Files that phases need where the built-in task does not write its own."""
    if config.data.train.startswith("task:"):
        return
    if config.sft.data is None and "sft" in config.phases:
        raise ValueError("sft.data: expected a file of demonstrations, or remove sft from phases")
    if config.sft.data is None and config.algorithm.sft_coef > 0:
        raise ValueError("algorithm.sft_coef mixes in demonstrations: set sft.data to a file of them")
    if config.reward_model.data is None and "reward" in config.phases:
        raise ValueError("reward_model.data: expected a file of pairs, or remove reward from phases")


CHECKS = (check_algorithm, check_value_model, check_sizes, check_data)
