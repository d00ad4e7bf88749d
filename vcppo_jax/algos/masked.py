"""Statistics over the valid slots of an array.

A mask (bool, integer or float; non-zero is valid) marks the slots that count. Masked slots are replaced
before anything is computed with them and again in what comes out (the double `where`), so that a NaN or
an infinity there harms neither a value nor a gradient. Everything is float32, whatever comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Axis = int | Sequence[int] | None

WHITEN_VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whiten`, as verl's `masked_whiten` does: bounds the scale-up to 1e4."""

STD_FLOOR = 1e-6
"""Added to a standard deviation before it divides, as in verl's `compute_grpo_outcome_advantage`."""


def is_known(*numbers: object) -> bool:
    """Whether the numbers are there to be checked: none is traced by `jit`, `vmap` or `grad`."""
    return not any(isinstance(number, jax.core.Tracer) for number in numbers)


def clean(caller: str, mask: ArrayLike, **arrays: ArrayLike) -> tuple[jax.Array, list[jax.Array]]:
    """The mask as bool, and the arrays, in the order given, as float32 with 0 in the masked slots.

    Raises ValueError, naming `caller` and the array, where a shape differs from the mask's.
    """
    valid = jnp.asarray(mask).astype(bool)
    cleaned = []
    for name, array in arrays.items():
        x = jnp.asarray(array, jnp.float32)
        if x.shape != valid.shape:
            raise ValueError(
                f"{caller}: expected {name} in the shape of the mask, {list(valid.shape)}, "
                f"got {list(x.shape)}; pass arrays of one shape"
            )
        cleaned.append(jnp.where(valid, x, 0.0))
    return valid, cleaned


def masked_mean(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None) -> jax.Array:
    """The mean over the valid slots, 0 where there is none; over `axis`, or over the whole array."""
    valid, (x,) = clean("masked_mean", mask, x=x)
    count = jnp.sum(valid, axis=axis)
    return jnp.sum(x, axis=axis) / jnp.maximum(count, 1)


def masked_var(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None) -> jax.Array:
    """The unbiased variance (over n - 1) of the valid slots; over `axis`, or over the whole array.

    Exactly 0 where fewer than two slots are valid or all valid values are equal: the rounded mean of equal
    values need not be that value, and what is left over would be scaled up by whoever divides by it.
    """
    valid, (x,) = clean("masked_var", mask, x=x)
    count = jnp.sum(valid, axis=axis)
    total = jnp.sum(x, axis=axis, keepdims=True)
    mean = total / jnp.maximum(jnp.sum(valid, axis=axis, keepdims=True), 1)
    squares = jnp.sum(jnp.where(valid, x - mean, 0.0) ** 2, axis=axis)
    fixed = jax.lax.stop_gradient(x)
    largest = jnp.max(fixed, axis=axis, where=valid, initial=-jnp.inf)
    smallest = jnp.min(fixed, axis=axis, where=valid, initial=jnp.inf)
    constant = (count < 2) | (largest == smallest)
    return jnp.where(constant, 0.0, squares / jnp.maximum(count - 1, 1))


def whiten(x: ArrayLike, mask: ArrayLike) -> jax.Array:
    """`(x - mean) / std` over all valid slots, float32 in the shape of `x`; 0 in masked slots.

    The mean and the unbiased std are those of the whole array, so call it on the global batch. A single
    valid value has no spread to be measured by: it comes out unchanged (its masked neighbours still as 0;
    with no valid value at all, everything is 0). Two or more equal values come out as 0.
    """
    valid, (x,) = clean("whiten", mask, x=x)
    variance = masked_var(x, valid)
    whitened = (x - masked_mean(x, valid)) * jax.lax.rsqrt(variance + WHITEN_VARIANCE_FLOOR)
    whitened = jnp.where(variance > 0, whitened, 0.0)
    return jnp.where(valid, jnp.where(jnp.sum(valid) > 1, whitened, x), 0.0)


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> jax.Array:
    """`1 - Var(G - V) / Var(G)` over the valid slots, with G the returns and V the values; a scalar.

    1 is a perfect value model, 0 is as good as a constant, below 0 is worse. Where the returns do not vary
    (or fewer than two are valid) there is nothing to explain, and it is 0.
    """
    valid, (values, returns) = clean("explained_variance", mask, values=values, returns=returns)
    variance = masked_var(returns, valid)
    residual = masked_var(returns - values, valid)
    varies = variance > 0
    return jnp.where(varies, 1.0 - residual / jnp.where(varies, variance, 1.0), 0.0)


def masked_correlation(x: ArrayLike, y: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Pearson's correlation of `x` and `y` over the valid slots, a scalar in [-1, 1].

    0 where one of them does not vary or fewer than two slots are valid.
    """
    valid, (x, y) = clean("masked_correlation", mask, x=x, y=y)
    var_x, var_y = masked_var(x, valid), masked_var(y, valid)
    products = (x - masked_mean(x, valid)) * (y - masked_mean(y, valid))
    covariance = jnp.sum(jnp.where(valid, products, 0.0)) / jnp.maximum(jnp.sum(valid) - 1, 1)
    varies = (var_x > 0) & (var_y > 0)
    scale = jnp.sqrt(jnp.where(varies, var_x, 1.0)) * jnp.sqrt(jnp.where(varies, var_y, 1.0))
    return jnp.where(varies, jnp.clip(covariance / scale, -1.0, 1.0), 0.0)
