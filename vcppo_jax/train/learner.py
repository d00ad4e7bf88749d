"""A network in training on a mesh: its compiled update and its scoring passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from vcppo_jax.data.packing import Packing, PackShape
from vcppo_jax.models.specs import is_spec, param_shardings
from vcppo_jax.sharding import DEFAULT_LAYOUT, named_sharding, put, to_host
from vcppo_jax.train.minibatches import MiniBatch
from vcppo_jax.train.updates import (
    Info,
    LossFunction,
    Params,
    TrainState,
    new_state,
    score_tokens,
    state_shardings,
    update,
)
from vcppo_jax.types import PackedBatch

BATCH_AXES = (None, "batch", "length")
"""Logical axes of a packed batch [M, R, L]."""


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


def put_batch(batch: PackedBatch, mesh: Mesh) -> PackedBatch:
    """The packed batch [M, R, L] on the mesh, its rows split over the batch axes."""
    return put(batch, named_sharding(mesh, BATCH_AXES))


def abstract_batch(shape: PackShape, fields: Sequence[str], mesh: Mesh) -> PackedBatch:
    """Shapes and shardings of a packed batch with these fields, as `put_batch` places it."""
    dimensions = (shape.micro_batches, shape.rows, shape.row_tokens)
    sharding = named_sharding(mesh, BATCH_AXES)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

    integers, numbers = array(np.int32), array(np.float32)
    return PackedBatch(
        tokens=integers,
        positions=integers,
        segment_ids=integers,
        targets=integers,
        mask=numbers,
        fields=dict.fromkeys(fields, numbers),
    )


class Learner:
    """The network whose weights `specs` describe, its objective and its optimizer.

    `layout`, one of `sharding.LAYOUTS`, is how its weights, gradients and optimizer states lie on `mesh`.
    """

    def __init__(
        self,
        name: str,
        specs: Any,
        objective: LossFunction,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        max_skipped: int,
        layout: str = DEFAULT_LAYOUT,
    ) -> None:
        self.name = name
        self.mesh = mesh
        self.max_skipped = max_skipped
        self._optimizer = optimizer
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, np.float32), specs, is_leaf=is_spec)
        self.shardings = state_shardings(optimizer, shapes, param_shardings(specs, mesh, layout), mesh)
        state = TrainState(
            params=shapes,
            opt_state=jax.eval_shape(optimizer.init, shapes),
            updates=jax.ShapeDtypeStruct((), np.int32),  # type: ignore[arg-type]
        )
        self.abstract_state: TrainState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self.shardings,
        )
        """Shapes, types and shardings of the state, for restoring it."""
        self._update = jax.jit(
            functools.partial(update, loss_function=objective, optimizer=optimizer),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
        )

    def new_state(self, params: Params) -> TrainState:
        """The state before the first update."""
        return new_state(self._optimizer, params, self.shardings)

    def trace(self, shape: PackShape, fields: Sequence[str]) -> jax.stages.Traced:
        """The update on mini-batches of this shape with these fields, for compiling it ahead of time."""
        batch = abstract_batch(shape, fields, self.mesh)
        with jax.set_mesh(self.mesh):
            return self._update.trace(self.abstract_state, batch, jax.ShapeDtypeStruct((), np.int32))

    def step(self, state: TrainState, packing: Packing, fields: Mapping[str, np.ndarray], where: str) -> Any:
        """(state, info as floats) after one update; the old state is donated.

        Raises NonFiniteError when `max_skipped` updates in a row were skipped.
        """
        state, info = self._start(state, packing, fields)
        return state, self._finish(info, packing, where)

    def steps(
        self, state: TrainState, batches: Iterable[MiniBatch], where: str
    ) -> tuple[TrainState, list[dict[str, float]]]:
        """(state, info of every update) after one update per mini-batch.

        While the device computes an update, the host packs the next mini-batch.
        """
        infos, under_way = [], None
        for packing, fields in batches:
            state, info = self._start(state, packing, fields)
            if under_way is not None:
                infos.append(self._finish(*under_way, where))
            under_way = info, packing
        if under_way is not None:
            infos.append(self._finish(*under_way, where))
        return state, infos

    def _start(
        self, state: TrainState, packing: Packing, fields: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, Info]:
        """The update, which need not be computed yet."""
        batch = put_batch(packing.batch(fields), self.mesh)
        return self._update(state, batch, np.int32(packing.micro_batches))

    def _finish(self, info: Info, packing: Packing, where: str) -> dict[str, float]:
        """Wait for an update's info; NonFiniteError as in `step`."""
        numbers = {name: float(x) for name, x in to_host(info).items()}
        numbers["packing_efficiency"] = packing.efficiency
        if numbers["skipped_in_row"] >= self.max_skipped:
            raise NonFiniteError(
                f"{where}: {self.name}: {int(numbers['skipped_in_row'])} updates in a row had a loss or "
                f"gradient that is not finite (loss {numbers['loss']}, norm {numbers['grad_norm']}); "
                "the weights are those before them. Lower the learning rate, or look at this step's samples"
            )
        return numbers


class Scorer:
    """A compiled pass that reads one number per response token: log-probs or values."""

    def __init__(self, score: Callable[[Params, PackedBatch], jax.Array], mesh: Mesh) -> None:
        self._mesh = mesh
        self._score = jax.jit(functools.partial(score_tokens, score=score))

    def trace(self, params: Params, shape: PackShape) -> jax.stages.Traced:
        """The pass over batches of this shape, for compiling it ahead of time; `params` may be abstract."""
        batch = abstract_batch(shape, (), self._mesh)
        with jax.set_mesh(self._mesh):
            return self._score.trace(params, batch, jax.ShapeDtypeStruct((), np.int32))

    def __call__(self, params: Params, packing: Packing) -> np.ndarray:
        """[B, T] float32; 0 beyond each response."""
        batch = put_batch(packing.batch({}), self._mesh)
        return packing.gather(to_host(self._score(params, batch, np.int32(packing.micro_batches))))
