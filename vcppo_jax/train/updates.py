"""Training states and the jittable steps over packed micro-batches: update, and scoring.

A loss is a sum over tokens with weights that count the whole mini-batch, so gradients and infos of
micro-batches add up, and a loop over a traced number of micro-batches serves every mini-batch with one
compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from vcppo_jax.sharding import put, replicated
from vcppo_jax.types import PackedBatch

Params = Any
Info = dict[str, jax.Array]
LossFunction = Callable[[Params, PackedBatch], tuple[jax.Array, Info]]


@struct.dataclass
class TrainState:
    """A network in training. Parameters and optimizer states are float32."""

    params: Params
    opt_state: optax.OptState
    updates: jax.Array
    """int32, updates tried so far, skipped ones included."""


def state_shardings(
    optimizer: optax.GradientTransformation, params: Params, param_shardings: Params, mesh: Mesh
) -> TrainState:
    """The sharding of every leaf of a `TrainState`: moments lie as their parameters do."""
    opt_state = jax.eval_shape(optimizer.init, params)
    whole = replicated(mesh)
    opt_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        param_shardings,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params=param_shardings, opt_state=opt_shardings, updates=whole)  # type: ignore[arg-type]


def new_state(optimizer: optax.GradientTransformation, params: Params, shardings: TrainState) -> TrainState:
    """The state before the first update."""
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    updates = put(np.int32(0), shardings.updates)  # type: ignore[arg-type]
    return TrainState(params=params, opt_state=opt_state, updates=updates)


def micro_batch(batch: PackedBatch, index: jax.Array) -> PackedBatch:
    """Micro-batch `index` of a packed batch [M, R, L]: [R, L]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def accumulate(
    loss_function: LossFunction, params: Params, batch: PackedBatch, count: jax.Array
) -> tuple[Params, jax.Array, Info]:
    """(gradients, loss, info), summed over the first `count` micro-batches."""
    gradient_function = jax.value_and_grad(loss_function, has_aux=True)

    def add(index: jax.Array, sums: Any) -> Any:
        (loss, info), gradients = gradient_function(params, micro_batch(batch, index))
        return jax.tree.map(jnp.add, sums, (gradients, loss, info))

    shapes = jax.eval_shape(loss_function, params, micro_batch(batch, jnp.int32(0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, *shapes))
    return jax.lax.fori_loop(0, count, add, zeros)


def update(
    state: TrainState,
    batch: PackedBatch,
    count: jax.Array,
    *,
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Info]:
    """One optimizer step on a mini-batch [M, R, L] of which `count` micro-batches hold something.

    `info` is the loss function's plus `loss`, `grad_norm` (before clipping), `skipped` (1 when the loss or
    the gradient was not finite: only the count of updates then changes) and `skipped_in_row`.
    """
    gradients, loss, info = accumulate(loss_function, state.params, batch, count)
    # A loss that is not finite must skip the update even where its gradient happens to be.
    gradients = jax.tree.map(lambda g: jnp.where(jnp.isfinite(loss), g, jnp.nan), gradients)
    changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    info = info | {
        "loss": loss,
        "grad_norm": optax.tree.norm(gradients),
        "skipped": 1.0 - opt_state.last_finite.astype(jnp.float32),
        "skipped_in_row": opt_state.notfinite_count.astype(jnp.float32),
    }
    return TrainState(params=params, opt_state=opt_state, updates=state.updates + 1), info


def score_tokens(
    params: Params,
    batch: PackedBatch,
    count: jax.Array,
    *,
    score: Callable[[Params, PackedBatch], jax.Array],
) -> jax.Array:
    """[M, R, L] float32: `score(params, micro_batch)` [R, L] of the first `count` micro-batches, 0 beyond."""

    def put(index: jax.Array, out: jax.Array) -> jax.Array:
        scores = score(params, micro_batch(batch, index)).astype(jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(out, scores, index, 0)

    return jax.lax.fori_loop(0, count, put, jnp.zeros(batch.tokens.shape, jnp.float32))
