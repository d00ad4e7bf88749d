"""The optimizer of every network: AdamW, clipped by global norm, that skips non-finite updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

SCHEDULES = {
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
}

DECAYED = ("kernel", "embed", "lm_head")
"""Weights that weight decay applies to: matrices, not norms and biases (which are stacked to 2-D too)."""


def learning_rate_schedule(
    *, learning_rate: float, warmup_steps: int, schedule: str, updates: int
) -> optax.Schedule:
    """Linear warm-up over `warmup_steps`, then `schedule` down to 0 at update number `updates`."""
    after = SCHEDULES[schedule](learning_rate, max(1, updates - warmup_steps))
    if warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, max(1, warmup_steps - 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
    learning_rate: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) behind a clip by global norm.

    An update with a gradient that is not finite leaves parameters and moments as they are and is counted
    (`optax.apply_if_finite`); when to give up is the host loop's decision, so here there is no limit.
    """
    return optax.apply_if_finite(
        optax.chain(
            optax.clip_by_global_norm(max_grad_norm),
            optax.adamw(
                learning_rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay, mask=decay_mask
            ),
        ),
        max_consecutive_errors=jnp.iinfo(jnp.int32).max - 1,
    )


def decay_mask(params: Any) -> Any:
    """True for the parameters that weight decay applies to."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)
