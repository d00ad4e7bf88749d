"""The compiled programs of a call of `generate`, with what they donate; `vcppo plan` has them too.

They are module-level and take the weights as arguments: new weights of the same shapes never compile again.
"""

from __future__ import annotations

import jax
import numpy as np

from vcppo_jax.models import decode
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import Params
from vcppo_jax.rollout import slots

decode_layer = jax.jit(decode.decode_layer, static_argnames=("config", "int8"))
decode_rest = jax.jit(decode.decode_rest, static_argnames="config")
new_slots = jax.jit(slots.new_slots, static_argnums=(0, 1, 2, 3))
prefill = jax.jit(slots.prefill_prompts, static_argnames="config")
swap = jax.jit(slots.swap, donate_argnums=0)
advance = jax.jit(slots.advance, static_argnames=("config", "sampling"), donate_argnames="slots")
grow_cache = jax.jit(slots.grow_cache, static_argnums=(1, 2))
keep_cache = jax.jit(slots.keep_cache)
keep_slots = jax.jit(slots.keep_slots)


def split_layers(params: Params) -> tuple[Params, Params]:
    """(the stacked layers, all other weights), as `decode_layer` and `decode_rest` take them."""
    return params["layers"], {name: weight for name, weight in params.items() if name != "layers"}


def decode_weights(params: Params, config: ModelConfig, *, int8: bool = False) -> Params:
    """The parameters in the compute dtype as decoding wants them, `layers` a tuple of one tree per layer.

    A call per layer: in one program TPU's compiler gathers all layers before it copies any to its result
    (temporaries as large as the weights).
    """
    layers, rest = split_layers(params)
    indices = range(config.num_layers)
    placed = tuple(decode_layer(layers, np.int32(index), config, int8=int8) for index in indices)
    return {**decode_rest(rest, config), "layers": placed}
