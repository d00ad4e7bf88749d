"""From rewards, log-probs and values to what the updates learn from, and the numbers to watch in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vcppo_jax.algos.advantages import at_last_token, group_advantages, rloo_advantages, to_tokens
from vcppo_jax.algos.gae import decoupled_gae, gae, length_adaptive_lambda, reward_to_go
from vcppo_jax.algos.losses import kl_penalty
from vcppo_jax.algos.masked import explained_variance, masked_correlation, masked_mean, whiten
from vcppo_jax.types import Experience

DECILES = 10


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """How advantages and returns are made; static under jit."""

    advantage: str
    """A key of `ESTIMATORS`."""
    group_size: int
    score_mean: str
    score_std: str
    gamma: float
    lambda_actor: float
    length_adaptive_alpha: float | None
    """VAPO's alpha, whose lambda then takes the place of `lambda_actor`."""
    lambda_critic: float
    whiten: bool
    kl_in_reward: bool
    kl_kind: str


Estimate = tuple[jax.Array, jax.Array]
"""(advantages, returns), each [B, T]."""


def _gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, settings: AdvantageSettings) -> Estimate:
    return decoupled_gae(
        rewards,
        values,
        mask,
        gamma=settings.gamma,
        lambda_actor=lambda_of_actor(mask, settings),
        lambda_critic=settings.lambda_critic,
    )


def _grpo(rewards: jax.Array, values: jax.Array, mask: jax.Array, settings: AdvantageSettings) -> Estimate:
    advantages = group_advantages(
        _per_response(rewards, mask),
        group_size=settings.group_size,
        mean=settings.score_mean,
        std=settings.score_std,
        valid=jnp.any(mask > 0, axis=-1),
    )
    return to_tokens(advantages, mask), jnp.zeros_like(rewards)


def _rloo(rewards: jax.Array, values: jax.Array, mask: jax.Array, settings: AdvantageSettings) -> Estimate:
    advantages = rloo_advantages(
        _per_response(rewards, mask), group_size=settings.group_size, valid=jnp.any(mask > 0, axis=-1)
    )
    return to_tokens(advantages, mask), jnp.zeros_like(rewards)


def _reinforce_pp(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, settings: AdvantageSettings
) -> Estimate:
    return reward_to_go(rewards, mask, gamma=settings.gamma), jnp.zeros_like(rewards)


def _reinforce_pp_baseline(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, settings: AdvantageSettings
) -> Estimate:
    return _grpo(rewards, values, mask, dataclasses.replace(settings, score_mean="group", score_std="none"))


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}
"""Only gae reads values and makes returns; the others leave the returns at 0."""


def lambda_of_actor(mask: jax.Array, settings: AdvantageSettings) -> jax.Array | float:
    """The policy's lambda: a number, or with `length_adaptive_alpha` one per response, [B]."""
    if settings.length_adaptive_alpha is None:
        return settings.lambda_actor
    return length_adaptive_lambda(jnp.sum(mask > 0, axis=-1), alpha=settings.length_adaptive_alpha)


def _per_response(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask > 0, rewards, 0.0), axis=-1)


def build_experience(
    rewards: jax.Array,
    mask: jax.Array,
    loss_mask: jax.Array,
    old_logprobs: jax.Array,
    ref_logprobs: jax.Array,
    values: jax.Array,
    kl_coef: jax.Array | float,
    *,
    settings: AdvantageSettings,
) -> tuple[Experience, jax.Array]:
    """(experience, advantages before whitening), each field [B, T].

    A response's reward, `rewards` [B], goes on its last token; with `kl_in_reward`, `kl_coef` times the KL of
    each token is taken off. Estimators without a value model compare the sums of these over each response.
    Whitening is over `loss_mask`, the tokens that the policy learns from.
    """
    token_rewards = at_last_token(rewards, mask)
    if settings.kl_in_reward:
        token_rewards = token_rewards - kl_coef * kl_penalty(
            old_logprobs, ref_logprobs, kind=settings.kl_kind, mask=mask
        )
    advantages, returns = ESTIMATORS[settings.advantage](token_rewards, values, mask, settings)
    raw = advantages
    if settings.whiten:
        advantages = whiten(advantages, loss_mask)
    experience = Experience(
        mask=mask.astype(jnp.float32),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=token_rewards,
        values=values,
        advantages=advantages,
        returns=returns,
    )
    return experience, raw


def position_profile(
    experience: Experience, raw_advantages: jax.Array, *, settings: AdvantageSettings
) -> dict[str, jax.Array]:
    """Means by token position, and how much of the last reward reaches a token; each [T].

    `values`, `advantages` (before whitening) and `count` (responses so long) by the position from the start;
    `reward_weight` and `distance_count` by the number of tokens d behind a token. The weight is measured: by
    how much the advantage rises when the last reward rises by 1. For GAE it is (gamma lambda)^d.
    """
    mask = experience.mask > 0
    ones = at_last_token(jnp.ones(mask.shape[0]), mask)
    raised = gae(
        experience.rewards + ones,
        experience.values,
        mask,
        gamma=settings.gamma,
        lam=lambda_of_actor(mask, settings),
    )
    weight = raised - raw_advantages
    length = mask.shape[1]
    behind = jnp.sum(mask, axis=-1, keepdims=True) - jnp.cumsum(mask, axis=-1)
    distance = jnp.where(mask, behind, length)
    return {
        "values": masked_mean(experience.values, mask, axis=0),
        "advantages": masked_mean(raw_advantages, mask, axis=0),
        "count": jnp.sum(mask, axis=0).astype(jnp.float32),
        "reward_weight": _means_by(distance, weight, length),
        "distance_count": jnp.zeros(length).at[distance].add(1.0, mode="drop"),
    }


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
    decile = jnp.where(mask, jnp.clip(jnp.floor(position * DECILES), 0, DECILES - 1), DECILES).astype(int)
    for name, x in (("advantages", raw_advantages), ("values", experience.values)):
        means = _means_by(decile, x, DECILES)
        metrics |= {f"critic/{name}/decile_{k}": means[k] for k in range(DECILES)}
    return metrics


def _means_by(index: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """[size]: the mean of `x` over the places with each index; 0 where there is none. Others are left out."""
    # The double `where`: what lies at the other places may be anything.
    x = jnp.where(index < size, x, 0.0)
    count = jnp.zeros(size).at[index].add(1.0, mode="drop")
    return jnp.zeros(size).at[index].add(x, mode="drop") / jnp.maximum(count, 1.0)
