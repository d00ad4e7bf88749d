"""The compiled programs of a call of `generate`, with what they donate; `vcppo plan` has them too.

They are module-level and take the weights as arguments: new weights of the same shapes never compile again.
"""

from __future__ import annotations

import jax

from vcppo_jax.models import decode
from vcppo_jax.rollout import slots

decode_weights = jax.jit(decode.decode_weights, static_argnames=("config", "int8"))
new_slots = jax.jit(slots.new_slots, static_argnums=(0, 1, 2, 3))
prefill = jax.jit(slots.prefill_prompts, static_argnames="config")
swap = jax.jit(slots.swap, donate_argnums=0)
advance = jax.jit(slots.advance, static_argnames=("config", "sampling"), donate_argnames="slots")
grow_cache = jax.jit(slots.grow_cache, static_argnums=(1, 2))
keep_cache = jax.jit(slots.keep_cache)
keep_slots = jax.jit(slots.keep_slots)
