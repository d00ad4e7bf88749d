"""From scores, log-probs and values to what the updates learn from, and the numbers to watch in it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from vcppo_jax.algos.advantages import at_last_token, grpo_advantages, to_tokens
from vcppo_jax.algos.gae import decoupled_gae
from vcppo_jax.algos.losses import kl_penalty
from vcppo_jax.algos.masked import explained_variance, masked_correlation, masked_mean, whiten
from vcppo_jax.types import Experience

DECILES = 10


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """How advantages and returns are made; static under jit."""

    advantage: str
    """"gae" or "grpo"."""
    group_size: int
    gamma: float
    lambda_actor: float
    lambda_critic: float
    whiten: bool
    kl_reward_coef: float
    kl_kind: str


def build_experience(
    scores: jax.Array,
    mask: jax.Array,
    old_logprobs: jax.Array,
    ref_logprobs: jax.Array,
    values: jax.Array,
    *,
    settings: AdvantageSettings,
) -> tuple[Experience, jax.Array]:
    """(experience, advantages before whitening), each field [B, T].

    The score [B] goes on the last response token; a KL penalty per token is subtracted from the rewards
    when `kl_reward_coef` is not 0. GRPO reads the scores alone and leaves `returns` at reward-to-go.
    """
    rewards = at_last_token(scores, mask)
    if settings.kl_reward_coef:
        penalty = kl_penalty(old_logprobs, ref_logprobs, kind=settings.kl_kind, mask=mask)
        rewards = rewards - settings.kl_reward_coef * penalty
    advantages, returns = decoupled_gae(
        rewards,
        values,
        mask,
        gamma=settings.gamma,
        lambda_actor=settings.lambda_actor,
        lambda_critic=settings.lambda_critic,
    )
    if settings.advantage == "grpo":
        advantages = to_tokens(grpo_advantages(scores, group_size=settings.group_size), mask)
    raw = advantages
    if settings.whiten and settings.advantage == "gae":
        advantages = whiten(advantages, mask)
    experience = Experience(
        mask=mask.astype(jnp.float32),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        values=values,
        advantages=advantages,
        returns=returns,
    )
    return experience, raw


def experience_metrics(experience: Experience, raw_advantages: jax.Array) -> dict[str, jax.Array]:
    """Scalars by verl's names: mean, max and min, explained variance, and position statistics.

    Rewards are summed over each response, as verl's; advantages, returns and values are over tokens.

    `decile_k` is the mean over the tokens in the k-th tenth of their response. Those of the advantages and
    `advantage_position_corr`, their correlation with t / length, are taken before whitening, which would
    hide a bias by subtracting it.
    """
    mask = experience.mask > 0
    metrics: dict[str, jax.Array] = {}
    per_sequence = jnp.sum(jnp.where(mask, experience.rewards, 0.0), axis=-1)
    metrics["critic/rewards/mean"] = masked_mean(per_sequence, jnp.any(mask, axis=-1))
    metrics["critic/rewards/max"] = jnp.max(per_sequence)
    metrics["critic/rewards/min"] = jnp.min(per_sequence)
    for name in ("advantages", "returns", "values"):
        x = getattr(experience, name)
        metrics[f"critic/{name}/mean"] = masked_mean(x, mask)
        metrics[f"critic/{name}/max"] = jnp.max(x, where=mask, initial=-jnp.inf)
        metrics[f"critic/{name}/min"] = jnp.min(x, where=mask, initial=jnp.inf)
    metrics["critic/vf_explained_var"] = explained_variance(experience.values, experience.returns, mask)
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    position = (jnp.cumsum(mask, axis=-1) - 1) / jnp.maximum(lengths, 1)
    metrics["critic/advantage_position_corr"] = masked_correlation(raw_advantages, position, mask)
    decile = jnp.clip(jnp.floor(position * DECILES), 0, DECILES - 1)
    for k in range(DECILES):
        here = mask & (decile == k)
        metrics[f"critic/advantages/decile_{k}"] = masked_mean(raw_advantages, here)
        metrics[f"critic/values/decile_{k}"] = masked_mean(experience.values, here)
    return metrics
