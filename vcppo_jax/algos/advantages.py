"""Advantages and rewards that start from one score per response.

Scores are [B], the samples of a prompt adjacent: rows 0 .. G-1 are the first prompt's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.masked import masked_mean, masked_var

GRPO_STD_FLOOR = 1e-6
"""Added to the group's std, as in verl's `compute_grpo_outcome_advantage`."""


def grpo_advantages(scores: ArrayLike, *, group_size: int) -> jax.Array:
    """GRPO's advantages [B], `(R - mean) / (std + 1e-6)` within each group (arXiv 2402.03300).

    The std is the unbiased one. A group whose scores are all equal, and a group of one, which has nothing
    to be compared with, give 0. Raises ValueError where B is not a multiple of `group_size`.
    """
    scores = jnp.asarray(scores, jnp.float32)
    if scores.ndim != 1 or group_size < 1 or scores.shape[0] % group_size:
        raise ValueError(
            f"grpo_advantages: expected scores [B] with B a multiple of group_size {group_size}, "
            f"got shape {list(scores.shape)}"
        )
    groups = scores.reshape(-1, group_size)
    everyone = jnp.ones(groups.shape, bool)
    mean = masked_mean(groups, everyone, axis=-1)[:, None]
    variance = masked_var(groups, everyone, axis=-1)[:, None]
    varies = variance > 0
    # The inner `where` keeps the gradient of the root finite at a variance of 0.
    std = jnp.sqrt(jnp.where(varies, variance, 1.0))
    return jnp.where(varies, (groups - mean) / (std + GRPO_STD_FLOOR), 0.0).reshape(-1)


def to_tokens(per_sequence: ArrayLike, mask: ArrayLike) -> jax.Array:
    """[B, T] float32: a sequence's number (its advantage) on each of its valid tokens, 0 where masked.

    Raises ValueError where `per_sequence` is not [B] for a mask [B, T].
    """
    numbers, valid = _scores_and_mask("to_tokens", per_sequence, mask)
    return jnp.where(valid, numbers[:, None], 0.0)


def at_last_token(per_sequence: ArrayLike, mask: ArrayLike) -> jax.Array:
    """[B, T] float32: a sequence's number (its score) on its last valid token, 0 elsewhere.

    A sequence without a valid token has no place for it, and its row is 0. Raises ValueError where
    `per_sequence` is not [B] for a mask [B, T].
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
