"""Policy losses, of one signature, and the correction for an engine whose log-probs differ.

Each loss is a weighted sum over tokens, as `losses.py` has it: parts of a batch that come with their part
of the global batch's weights add up. A part must hold whole sequences for `gspo_loss`, whose ratio is one
per sequence. Arrays are [B, T], or packed rows [R, L] with `segment_ids`; all results are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.losses import LOG_RATIO_LIMIT, both_weights
from vcppo_jax.algos.masked import clean, is_known

LossAndInfo = tuple[jax.Array, dict[str, jax.Array]]


def policy_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: str | None = None,
    weights: ArrayLike | None = None,
    info_weights: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> LossAndInfo:
    """`(loss, info)`: PPO's clipped objective (arXiv 1707.06347), negated so that it is minimised.

    With ratio r = exp(logprobs - old_logprobs), per token

        max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)

    and, where A < 0 and `dual_clip` is c (above 1, arXiv 1912.09729), at most -c A. `clip_low` is in
    [0, 1]; at 1 there is no lower bound. `segment_ids` is not read: no token needs its neighbours.

    The tokens are summed with `weights` or `aggregation`, and each entry of `info` is
    `sum(info_weights * x)`, as `losses.both_weights` says. The entries, named as verl's after `actor/`:
    `pg_clipfrac`, tokens that the clip took; `pg_clipfrac_lower`, tokens that the dual clip took;
    `ppo_kl`, the k1 estimate of KL(old || new); and `ratio_mean`.

    Raises ValueError on different shapes, on bounds out of range, on an unknown aggregation, and where
    neither `aggregation` nor `weights` is given.
    """
    _check_bounds("policy_loss", clip_low, clip_high, dual_clip)
    tokens = _tokens(
        "policy_loss", logprobs, old_logprobs, advantages, mask, aggregation, weights, info_weights
    )
    ratio = jnp.exp(_bounded(tokens.log_ratio))
    return _clipped_surrogate(tokens, ratio, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: str | None = None,
    weights: ArrayLike | None = None,
    info_weights: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> LossAndInfo:
    """`(loss, info)`: GSPO's objective (arXiv 2507.18071), `policy_loss` with one ratio per sequence,

        s = exp(mean over the sequence's valid tokens of (logprobs - old_logprobs))

    Each token carries the loss of its sequence, so that the weights of seq-mean-token-mean give the
    paper's objective. The gradient is taken in the paper's token form, with s_t = sg(s) pi_t / sg(pi_t),
    sg the stopped gradient. Where all tokens of a sequence have one advantage, as in the paper, it is the
    gradient of s itself; with an advantage per token each token keeps its own.

    `segment_ids` [R, L], whole numbers 1 .. L and 0 for padding as in `PackedBatch`, tell the sequences of
    a packed row apart; with None a row is one sequence. The rest as in `policy_loss`; in `info`, the clip
    fractions and `ratio_mean` speak of s, and a token counts as clipped where its sequence is. Raises
    ValueError as `policy_loss` does and on `segment_ids` of another shape.
    """
    _check_bounds("gspo_loss", clip_low, clip_high, dual_clip)
    tokens = _tokens(
        "gspo_loss", logprobs, old_logprobs, advantages, mask, aggregation, weights, info_weights
    )
    mean = _sequence_mean("gspo_loss", jax.lax.stop_gradient(tokens.log_ratio), tokens.valid, segment_ids)
    log_s = mean + (tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs))
    return _clipped_surrogate(tokens, jnp.exp(_bounded(log_s)), clip_low, clip_high, dual_clip)


def cispo_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: str | None = None,
    weights: ArrayLike | None = None,
    info_weights: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> LossAndInfo:
    """`(loss, info)`: CISPO's objective (arXiv 2506.13585), which clips the weight and not the update:

        -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs

    with r the ratio per token and sg the stopped gradient, so that every token keeps a gradient. The paper
    bounds r above only: `clip_low` = 1. `segment_ids` is not read. The rest as in `policy_loss`; in `info`,
    `pg_clipfrac` counts the tokens whose ratio was out of bounds and `pg_clipfrac_lower` is 0.

    Raises ValueError as `policy_loss` does, and on a `dual_clip`: the weight is bounded already.
    """
    if dual_clip is not None:
        raise ValueError(
            f"cispo_loss: expected dual_clip None, got {dual_clip}; clip_high bounds the ratio of every token"
        )
    _check_bounds("cispo_loss", clip_low, clip_high, dual_clip)
    tokens = _tokens(
        "cispo_loss", logprobs, old_logprobs, advantages, mask, aggregation, weights, info_weights
    )
    ratio = jax.lax.stop_gradient(jnp.exp(_bounded(tokens.log_ratio)))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    token_loss = -bounded * tokens.advantages * tokens.logprobs
    info = _info(tokens, ratio, bounded != ratio, jnp.zeros(ratio.shape, bool))
    return jnp.sum(tokens.weights * token_loss), info


POLICY_LOSSES: dict[str, Callable[..., LossAndInfo]] = {
    "ppo": policy_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}


class _Tokens(NamedTuple):
    """The cleaned arguments of a policy loss, each in the shape of the mask."""

    valid: jax.Array
    logprobs: jax.Array
    log_ratio: jax.Array
    """logprobs - old_logprobs."""
    advantages: jax.Array
    weights: jax.Array
    info_weights: jax.Array


def _tokens(
    caller: str,
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    aggregation: str | None,
    weights: ArrayLike | None,
    info_weights: ArrayLike | None,
) -> _Tokens:
    valid, (logprobs, old_logprobs, advantages) = clean(
        caller, mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    weights, info_weights = both_weights(caller, valid, aggregation, weights, info_weights)
    old_logprobs, advantages = jax.lax.stop_gradient((old_logprobs, advantages))
    return _Tokens(valid, logprobs, logprobs - old_logprobs, advantages, weights, info_weights)


def _check_bounds(caller: str, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if is_known(clip_low, clip_high) and (not 0 <= clip_low <= 1 or clip_high < 0):
        raise ValueError(
            f"{caller}: expected clip_low in [0, 1] and clip_high of at least 0, "
            f"got {clip_low} and {clip_high}"
        )
    if dual_clip is not None and is_known(dual_clip) and dual_clip <= 1:
        raise ValueError(f"{caller}: expected dual_clip above 1 or None, got {dual_clip}")


def _bounded(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped_surrogate(
    tokens: _Tokens, ratio: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossAndInfo:
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    token_loss = jnp.maximum(unclipped, clipped)
    dual_clipped = jnp.zeros(ratio.shape, bool)
    if dual_clip is not None:
        limit = -tokens.advantages * dual_clip
        dual_clipped = (tokens.advantages < 0) & (token_loss > limit)
        token_loss = jnp.where(dual_clipped, limit, token_loss)
    return jnp.sum(tokens.weights * token_loss), _info(tokens, ratio, clipped > unclipped, dual_clipped)


def _info(
    tokens: _Tokens, ratio: jax.Array, clipped: jax.Array, dual_clipped: jax.Array
) -> dict[str, jax.Array]:
    return {
        "pg_clipfrac": jnp.sum(tokens.info_weights * clipped),
        "pg_clipfrac_lower": jnp.sum(tokens.info_weights * dual_clipped),
        "ppo_kl": jnp.sum(tokens.info_weights * -_bounded(tokens.log_ratio)),
        "ratio_mean": jnp.sum(tokens.info_weights * ratio),
    }


def _sequence_mean(caller: str, x: jax.Array, valid: jax.Array, segment_ids: ArrayLike | None) -> jax.Array:
    """For each slot the mean of `x` over the valid slots of its sequence; `x` is 0 where masked."""
    if segment_ids is None:
        count = jnp.sum(valid, axis=-1, keepdims=True)
        mean = jnp.sum(x, axis=-1, keepdims=True) / jnp.maximum(count, 1)
        return jnp.broadcast_to(mean, x.shape)
    segments = jnp.asarray(segment_ids, jnp.int32)
    if segments.shape != valid.shape:
        raise ValueError(
            f"{caller}: expected segment_ids in the shape of the mask, {list(valid.shape)}, "
            f"got {list(segments.shape)}; pass arrays of one shape"
        )
    length = valid.shape[-1]

    def row_mean(x: jax.Array, valid: jax.Array, segments: jax.Array) -> jax.Array:
        # Sums per segment hold [L + 1], where a comparison of every slot with every other would hold [L, L].
        total = jax.ops.segment_sum(x, segments, num_segments=length + 1)
        count = jax.ops.segment_sum(valid.astype(jnp.float32), segments, num_segments=length + 1)
        return (total / jnp.maximum(count, 1.0))[segments]

    rows = (array.reshape(-1, length) for array in (x, valid, segments))
    return jax.vmap(row_mean)(*rows).reshape(x.shape)


def _token_difference(difference: jax.Array) -> jax.Array:
    return difference


def _sequence_difference(difference: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.sum(difference, axis=-1, keepdims=True), difference.shape)


IMPORTANCE_LEVELS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "token": _token_difference,
    "sequence": _sequence_difference,
}


def importance_weights(
    trainer_logprobs: ArrayLike, engine_logprobs: ArrayLike, mask: ArrayLike, *, level: str, cap: float
) -> jax.Array:
    """[B, T] float32: truncated importance weights, for samples whose engine computes other log-probs.

    min(pi_trainer / pi_engine, cap), a factor of each token's weight or advantage, where both probabilities
    are those of the same parameters and temperature and differ by the arithmetic only (Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). `level` is "token", the ratio
    of each token, or "sequence", the ratio of the whole response (the exponential of the *sum* of the
    differences) on each of its tokens; one sequence a row. 0 where masked; no gradient.

    Raises ValueError on an unknown level, a cap that is not positive, and different shapes.
    """
    if level not in IMPORTANCE_LEVELS:
        raise ValueError(
            f"importance_weights: expected level as one of {list(IMPORTANCE_LEVELS)}, got {level!r}"
        )
    if is_known(cap) and cap <= 0:
        raise ValueError(f"importance_weights: expected a positive cap, got {cap}")
    valid, (trainer, engine) = clean(
        "importance_weights", mask, trainer_logprobs=trainer_logprobs, engine_logprobs=engine_logprobs
    )
    log_ratio = _bounded(IMPORTANCE_LEVELS[level](trainer - engine))
    weights = jnp.where(valid, jnp.minimum(jnp.exp(log_ratio), cap), 0.0)
    return jax.lax.stop_gradient(weights)
