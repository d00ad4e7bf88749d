"""Moves weights from one layout to another on the devices that hold them; for use under `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vcppo_jax.models.decoder import Params
from vcppo_jax.models.specs import WeightSpec, is_spec
from vcppo_jax.sharding import constrain


def reshard(params: Params, specs: Any, *, layout: str, dtype: DTypeLike) -> Params:
    """A copy of the parameters of `specs` in `dtype`, lying on the mesh in context as `layout` says.

    Layer by layer, each cast before it is moved: beside the copy no more than a layer exists, and what goes
    over the network is of `dtype`.
    """

    def place(spec: WeightSpec, weight: jax.Array, first: int) -> jax.Array:
        copied = jnp.array(weight, dtype, copy=True)
        return constrain(copied, *spec.axes[first:], layout=layout)

    def one_layer(layer: Params) -> Params:
        return jax.tree.map(lambda s, w: place(s, w, 1), specs["layers"], layer, is_leaf=is_spec)

    rest = {name: weight for name, weight in params.items() if name != "layers"}
    rest_specs = {name: specs[name] for name in rest}
    placed = jax.tree.map(lambda s, w: place(s, w, 0), rest_specs, rest, is_leaf=is_spec)
    return {**placed, "layers": jax.lax.map(one_layer, params["layers"])}
