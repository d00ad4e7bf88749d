"""Advantages and rewards that start from one score per response.

Scores are [B], the samples of a prompt adjacent: rows 0 .. G-1 are the first prompt's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.masked import STD_FLOOR, clean, masked_mean, masked_var

# What a statistic of scores [P, G], P prompts with G samples each, is taken over: its axis.
SCOPES = {"group": -1, "batch": None}


def group_advantages(
    scores: ArrayLike, *, group_size: int, mean: str, std: str, valid: ArrayLike | None = None
) -> jax.Array:
    """Advantages [B] from scores [B]: `(R - mean) / (std + 1e-6)`.

    `mean` and `std` are each "none", "group" (over the samples of a prompt) or "batch" (over all scores):

        mean   std
        group  group  GRPO, arXiv 2402.03300
        group  none   Dr. GRPO, arXiv 2503.20783; whitened afterwards, REINFORCE++ with a baseline, 2501.03262
        group  batch  Lite PPO, arXiv 2508.08221

    The std is the unbiased one of the scores as they came. Where it is 0, all scores of its set being equal
    or alone, nothing is divided. So with `mean` "group", equal scores and a group of one give exactly 0; a
    group whose scores are equal but differ from a `mean` of "batch" keeps that difference.

    `valid` [B] is False for an empty response: its row enters no statistic, is not read and comes out as 0.
    Raises ValueError on an unknown scope, on another shape, and where B is not a multiple of `group_size`.
    """
    for name, scope in (("mean", mean), ("std", std)):
        if scope != "none" and scope not in SCOPES:
            raise ValueError(
                f"group_advantages: expected {name} as one of {['none', *SCOPES]}, got {scope!r}"
            )
    groups, real = _groups("group_advantages", scores, group_size, valid)
    advantages = groups if mean == "none" else _centred(groups, real, SCOPES[mean])
    if std != "none":
        variance = masked_var(groups, real, axis=SCOPES[std]).reshape(-1, 1)
        varies = variance > 0
        # The inner `where` keeps the gradient of the root finite at a variance of 0.
        divisor = jnp.sqrt(jnp.where(varies, variance, 1.0)) + STD_FLOOR
        advantages = advantages / jnp.where(varies, divisor, 1.0)
    return jnp.where(real, advantages, 0.0).reshape(-1)


def rloo_advantages(scores: ArrayLike, *, group_size: int, valid: ArrayLike | None = None) -> jax.Array:
    """RLOO's advantages [B], each score less the mean of its group's others (arXiv 2402.14740).

    That is `G / (G - 1) (R - mean)`, with G the valid samples of the group. A group of one, which has no
    others, gives 0, and so do equal scores. `valid` and the errors raised as in `group_advantages`.
    """
    groups, real = _groups("rloo_advantages", scores, group_size, valid)
    count = jnp.sum(real, axis=-1, keepdims=True)
    factor = count / jnp.maximum(count - 1, 1)
    return jnp.where(real, factor * _centred(groups, real, SCOPES["group"]), 0.0).reshape(-1)


def _centred(groups: jax.Array, real: jax.Array, axis: int | None) -> jax.Array:
    """Scores less their mean over `axis`.

    Exactly 0 where all are equal: the rounded mean of equal scores need not be that score, and a division
    by a small std would make something of the rest. So the largest score is taken off first.
    """
    largest = jnp.max(groups, axis=axis, where=real, initial=-jnp.inf).reshape(-1, 1)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    shifted = groups - shift
    return shifted - masked_mean(shifted, real, axis=axis).reshape(-1, 1)


def _groups(
    caller: str, scores: ArrayLike, group_size: int, valid: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Scores and their validity, each [P, G]; 0 where not valid."""
    scores = jnp.asarray(scores, jnp.float32)
    if scores.ndim != 1 or group_size < 1 or scores.shape[0] % group_size:
        raise ValueError(
            f"{caller}: expected scores [B] with B a multiple of group_size {group_size}, "
            f"got shape {list(scores.shape)}"
        )
    real = jnp.ones(scores.shape, bool) if valid is None else jnp.asarray(valid)
    real, (scores,) = clean(caller, real, scores=scores)
    return scores.reshape(-1, group_size), real.reshape(-1, group_size)


def to_tokens(per_sequence: ArrayLike, mask: ArrayLike) -> jax.Array:
    """[B, T] float32: a sequence's number (its advantage) on each of its valid tokens, 0 where masked.

    Raises ValueError where `per_sequence` is not [B] for a mask [B, T].
    """
    numbers, valid = _scores_and_mask("to_tokens", per_sequence, mask)
    return jnp.where(valid, numbers[:, None], 0.0)


def at_last_token(per_sequence: ArrayLike, mask: ArrayLike) -> jax.Array:
    """[B, T] float32: a sequence's number (its score) on its last valid token, 0 elsewhere.

    An empty response has no token to carry a score: its row is 0, whatever its score, so that it changes no
    return and no sum of rewards. Raises ValueError where `per_sequence` is not [B] for a mask [B, T].
    """
    numbers, valid = _scores_and_mask("at_last_token", per_sequence, mask)
    valid_after = jnp.cumsum(valid[:, ::-1], axis=-1)[:, ::-1] - valid
    return jnp.where(valid & (valid_after == 0), numbers[:, None], 0.0)


def _scores_and_mask(caller: str, per_sequence: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    numbers = jnp.asarray(per_sequence, jnp.float32)
    valid = jnp.asarray(mask).astype(bool)
    if valid.ndim != 2 or numbers.shape != valid.shape[:1]:
        raise ValueError(
            f"{caller}: expected one number per sequence, [B], and a mask [B, T], "
            f"got {list(numbers.shape)} and {list(valid.shape)}"
        )
    return numbers, valid
