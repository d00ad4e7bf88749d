"""Scores before they become advantages: scale, length penalty, running normalisation; the reward model's
loss and the adaptive KL coefficient.

Scores are one per response, [B], float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.masked import STD_FLOOR, clean, masked_mean, masked_var

KL_ERROR_LIMIT = 0.2
"""Bound on the relative error that moves the KL coefficient (arXiv 1909.08593, section 2.2)."""

SCALES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "plus_minus_one": lambda scores: scores,
    "zero_one": lambda scores: (scores + 1.0) / 2.0,
}


def scale_scores(scores: ArrayLike, scale: str) -> jax.Array:
    """Scores in {-1, 1}, the verifier's, on the `scale` "plus_minus_one" (as they are) or "zero_one".

    Scores between or beyond move along the same line. Raises ValueError on an unknown scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale_scores: expected scale as one of {list(SCALES)}, got {scale!r}")
    return SCALES[scale](jnp.asarray(scores, jnp.float32))


def soft_overlong_penalty(lengths: ArrayLike, *, max_length: int, buffer: int) -> jax.Array:
    """DAPO's soft overlong punishment, added to scores, in the shape of `lengths` (arXiv 2503.14476, 13).

        0                                         where length <= max_length - buffer
        (max_length - buffer - length) / buffer   from there to max_length
        -1                                        beyond

    All three in response tokens. Raises ValueError where `buffer` is not in [1, max_length].
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"soft_overlong_penalty: expected buffer in [1, max_length {max_length}], got {buffer}"
        )
    lengths = jnp.asarray(lengths, jnp.float32)
    return jnp.clip((max_length - buffer - lengths) / buffer, -1.0, 0.0)


class RunningMoments(NamedTuple):
    """Count, mean and summed squared deviations of all scores seen; float32 scalars, a pytree."""

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    mean: jax.Array
    m2: jax.Array


def no_moments() -> RunningMoments:
    """The moments before the first score."""
    return RunningMoments(*(jnp.zeros((), jnp.float32) for _ in RunningMoments._fields))


def update_moments(moments: RunningMoments, scores: ArrayLike, valid: ArrayLike) -> RunningMoments:
    """The moments with the valid ones of `scores` [B] added; `valid` [B] as a mask.

    Chan, Golub and LeVeque's merge of two sets, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979, which does not cancel as a sum of squares would. A batch without a valid score
    changes nothing. Raises ValueError on different shapes.
    """
    valid, (scores,) = clean("update_moments", valid, scores=scores)
    count = jnp.sum(valid).astype(jnp.float32)
    mean, variance = masked_mean(scores, valid), masked_var(scores, valid)
    total = moments.count + count
    share = count / jnp.maximum(total, 1.0)
    delta = mean - moments.mean
    return RunningMoments(
        count=total,
        mean=moments.mean + delta * share,
        m2=moments.m2 + variance * jnp.maximum(count - 1.0, 0.0) + delta**2 * moments.count * share,
    )


def normalize_by_moments(scores: ArrayLike, moments: RunningMoments) -> jax.Array:
    """`(score - mean) / (std + 1e-6)` by the moments, with the unbiased std; float32 in the shape given.

    With fewer than two scores seen, or with equal ones only, there is no spread to divide by, and the
    scores are centred alone.
    """
    variance = moments.m2 / jnp.maximum(moments.count - 1.0, 1.0)
    varies = variance > 0
    scale = jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1.0)) + STD_FLOOR, 1.0)
    return (jnp.asarray(scores, jnp.float32) - moments.mean) / scale


def bradley_terry_loss(chosen: ArrayLike, rejected: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`(loss, accuracy)` of a reward model on pairs (Bradley-Terry; arXiv 2203.02155, equation 1).

    `chosen` and `rejected` [N] are the scores of the better and the worse response to a prompt. The loss is
    the mean of -log sigmoid(chosen - rejected), the accuracy the share of pairs with chosen > rejected; both
    are 0 where N is 0. Raises ValueError on different shapes.
    """
    chosen = jnp.asarray(chosen, jnp.float32)
    everyone, (rejected,) = clean("bradley_terry_loss", jnp.ones(chosen.shape, bool), rejected=rejected)
    loss = masked_mean(jax.nn.softplus(rejected - chosen), everyone)
    return loss, masked_mean(chosen > rejected, everyone)


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """The next KL coefficient, on the host (Ziegler et al., arXiv 1909.08593, section 2.2):

        coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)

    `kl` is the one measured on `samples` responses; `horizon` counts responses too, as in the authors'
    code, where the paper writes K = samples / horizon. Raises ValueError where `target` or `horizon` is not
    positive, where `samples` is so large that the coefficient could reach 0, and on a `kl` that is not
    finite, which would stay in the coefficient for ever.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(
            f"adaptive_kl_coef: expected a positive target and horizon, got {target} and {horizon}"
        )
    if KL_ERROR_LIMIT * samples >= horizon:
        raise ValueError(
            f"adaptive_kl_coef: expected a horizon above {KL_ERROR_LIMIT} x {samples} samples, got {horizon}"
        )
    if not math.isfinite(kl):
        raise ValueError(f"adaptive_kl_coef: expected a finite kl, got {kl}; the log-probs are not finite")
    error = min(max(kl / target - 1.0, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return coef * (1.0 + error * samples / horizon)
