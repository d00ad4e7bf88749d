"""Losses as weighted sums over tokens, the value loss and the KL estimators; policy losses: `policy.py`.

How a loss is averaged is a weight per token (`token_weights`) whose denominator counts the whole global
batch; the loss is then `sum(weight * token_loss)`. A caller that splits the batch (micro-batches, packing,
devices) computes the weights once for all of it and hands each part its own: the parts' losses, gradients
and infos add up to those of the whole, whatever the split.

Arrays are [B, T], or packed rows [R, L] with weights that come along; all results are float32. What masked
slots hold is never read. The arguments that are constants of the objective (old log-probs, old values,
advantages, returns) get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.masked import clean, is_known

LOG_RATIO_LIMIT = 20.0
"""Bound on a log-ratio before `exp`, as in verl: e^20 = 4.9e8 can still be multiplied and summed in float32,
e^89 is infinite. Beyond the bound, which a healthy run never sees, the gradient is 0."""


def _token_mean(valid: jax.Array, norm_length: float) -> jax.Array:
    return valid / jnp.maximum(jnp.sum(valid), 1.0)


def _token_sum(valid: jax.Array, norm_length: float) -> jax.Array:
    return valid


def _seq_mean_token_sum(valid: jax.Array, norm_length: float) -> jax.Array:
    return valid / _sequence_count(valid)


def _seq_mean_token_mean(valid: jax.Array, norm_length: float) -> jax.Array:
    lengths = jnp.sum(valid, axis=-1, keepdims=True)
    return valid / jnp.maximum(lengths, 1.0) / _sequence_count(valid)


def _seq_mean_token_sum_norm(valid: jax.Array, norm_length: float) -> jax.Array:
    return valid / norm_length / _sequence_count(valid)


def _sequence_count(valid: jax.Array) -> jax.Array:
    """The number of sequences with a valid token, at least 1."""
    return jnp.maximum(jnp.sum(jnp.any(valid > 0, axis=-1).astype(jnp.float32)), 1.0)


AGGREGATIONS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}


def token_weights(mask: ArrayLike, *, aggregation: str, norm_length: float | None = None) -> jax.Array:
    """The weight of each token in a loss, float32 in the shape of `mask`, 0 where masked.

    `mask` is that of the whole global batch, [..., T] with one sequence a row (not packed). With n the
    number of rows that have a valid token and |o| the valid tokens of a row, a valid token weighs

        token-mean               1 / (valid tokens of the batch)
        token-sum                1
        seq-mean-token-sum       1 / n
        seq-mean-token-mean      1 / (n |o|)
        seq-mean-token-sum-norm  1 / (n norm_length)     Dr. GRPO's constant length

    Rows without a valid token change nothing. `norm_length`, read by the last mode only, is T unless given:
    give the response limit where T is the longest response or a bucket, which differs between batches.
    Raises ValueError on an unknown mode and on a `norm_length` that is not positive.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: expected one of {list(AGGREGATIONS)}, got {aggregation!r}")
    if norm_length is not None and is_known(norm_length) and norm_length <= 0:
        raise ValueError(f"token_weights: expected a positive norm_length, got {norm_length}")
    valid = jnp.asarray(mask).astype(bool).astype(jnp.float32)
    return AGGREGATIONS[aggregation](valid, valid.shape[-1] if norm_length is None else norm_length)


def weighted_sum(x: ArrayLike, weights: ArrayLike) -> jax.Array:
    """`sum(weights * x)`, a scalar; `x` is not read where a weight is 0.

    Aggregates any per-token quantity: entropy, KL, the negative log-likelihood of a demonstration.
    """
    _, (x, weights) = clean("weighted_sum", jnp.asarray(weights) != 0, x=x, weights=weights)
    return jnp.sum(weights * x)


def both_weights(
    caller: str,
    valid: jax.Array,
    aggregation: str | None,
    weights: ArrayLike | None,
    info_weights: ArrayLike | None,
) -> tuple[jax.Array, jax.Array]:
    """The weights of a loss and of its info, float32 in the shape of `valid`, 0 where masked, no gradient.

    Those of the loss are `weights` or, where that is None, those of `aggregation` over this mask; `weights`
    goes first where both are given. Those of the info are the token-mean weights of this mask unless given:
    micro-batches whose infos are to add up to the global batch's pass their part of its token-mean weights.
    Raises ValueError, naming `caller`, where neither `aggregation` nor `weights` is given, on an unknown
    aggregation and on different shapes.
    """
    if weights is None:
        if aggregation is None:
            raise ValueError(
                f"{caller}: expected aggregation, one of {list(AGGREGATIONS)}, or weights, got neither"
            )
        weights = token_weights(valid, aggregation=aggregation)
    if info_weights is None:
        info_weights = token_weights(valid, aggregation="token-mean")
    _, both = clean(caller, valid, weights=weights, info_weights=info_weights)
    weights, info_weights = jax.lax.stop_gradient(both)
    return weights, info_weights


def value_loss(
    values: ArrayLike,
    old_values: ArrayLike | None,
    returns: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float | None,
    aggregation: str | None = None,
    weights: ArrayLike | None = None,
    info_weights: ArrayLike | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`(loss, info)`: half the squared error of the values, per token

        1/2 (V - R)^2                                                  where `clip` is None
        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)   otherwise

    `old_values` is read only with a `clip` and may be None without. The tokens are
    summed with `weights` or `aggregation`, and each entry of `info` is `sum(info_weights * x)`, as
    `both_weights` says. The entries, named as verl's after `critic/`: `vf_clipfrac`, tokens that the clip
    took (0 without a clip), and `vpred_mean`.

    Raises ValueError as `both_weights` does, on different shapes, and on a `clip` that is not positive or
    lacks `old_values`.
    """
    valid, (values, returns) = clean("value_loss", mask, values=values, returns=returns)
    weights, info_weights = both_weights("value_loss", valid, aggregation, weights, info_weights)
    returns = jax.lax.stop_gradient(returns)

    squares = (values - returns) ** 2
    clip_taken = jnp.zeros(valid.shape, bool)
    if clip is not None:
        if (is_known(clip) and clip <= 0) or old_values is None:
            raise ValueError(
                f"value_loss: expected clip as a positive number with old_values, or None, got {clip} "
                f"{'without' if old_values is None else 'with'} old_values"
            )
        _, (old_values,) = clean("value_loss", valid, old_values=old_values)
        old_values = jax.lax.stop_gradient(old_values)
        clipped_squares = (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2
        clip_taken = clipped_squares > squares
        squares = jnp.maximum(squares, clipped_squares)

    info = {
        "vf_clipfrac": jnp.sum(info_weights * clip_taken),
        "vpred_mean": jnp.sum(info_weights * values),
    }
    return jnp.sum(weights * 0.5 * squares), info


def _k1(log_ratio: jax.Array) -> jax.Array:
    return log_ratio


def _k2(log_ratio: jax.Array) -> jax.Array:
    return 0.5 * log_ratio**2


def _k3(log_ratio: jax.Array) -> jax.Array:
    # Bounding the exponent alone would leave a gradient that drives the two apart.
    to_ref = jnp.minimum(-log_ratio, LOG_RATIO_LIMIT)
    return jnp.expm1(to_ref) - to_ref


KL_KINDS: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_penalty(
    logprobs: ArrayLike, ref_logprobs: ArrayLike, *, kind: str, mask: ArrayLike | None = None
) -> jax.Array:
    """Per token, an estimate of KL(policy || reference) from the sampled token; float32, same shape.

    With d = logprobs - ref_logprobs (Schulman, "Approximating KL Divergence", 2020)

        k1  d                   unbiased, may be negative
        k2  d^2 / 2             biased, its gradient is that of the KL
        k3  exp(-d) - 1 + d     unbiased, never negative; constant for d < -20, or exp would overflow

    With a `mask`, masked slots are not read and come out as 0, in the gradient too. Raises ValueError on an
    unknown kind and on different shapes.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl_penalty: expected kind as one of {list(KL_KINDS)}, got {kind!r}")
    if mask is None:
        mask = jnp.ones(jnp.asarray(logprobs).shape, bool)
    _, (logprobs, ref_logprobs) = clean("kl_penalty", mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return KL_KINDS[kind](logprobs - ref_logprobs)
