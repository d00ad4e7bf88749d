"""Prefill and decoding with a KV cache.

Layers are unrolled over weights that were unstacked once, outside the loop: a step then neither slices
stacked weights nor copies the cache, which is one array per layer, updated in place. Each row has its own
position, so rows of different lengths decode together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from vcppo_jax.models.attention import attention
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import (
    Params,
    embed_tokens,
    finish_layer,
    project_qkv,
    rms_norm,
    rope_angles,
)
from vcppo_jax.models.specs import WeightSpec, is_spec, weight_specs
from vcppo_jax.sharding import constrain, context_device, map_shards


@struct.dataclass
class Cache:
    """Keys and values of the tokens so far; B rows, S slots, K kv heads of width H."""

    keys: tuple[jax.Array, ...]
    """Per layer [B, K, S, H]; with `keys_slots_last` [B, K, H, S]."""
    values: tuple[jax.Array, ...]
    """Per layer [B, K, S, H]."""
    lengths: jax.Array
    """[B] int32, tokens in the cache; the next one goes there."""
    keys_slots_last: bool = struct.field(pytree_node=False)
    """Chosen by the hardware, see `_keys_slots_last`."""

    @property
    def size(self) -> int:
        """S."""
        return self.values[0].shape[2]

    @property
    def slot_axes(self) -> tuple[int, int]:
        """Which axis S is, in keys and in values."""
        return 3 if self.keys_slots_last else 2, 2


def _on_cpu() -> bool:
    return context_device().platform == "cpu"


def _keys_slots_last() -> bool:
    """Whether keys are best kept as [B, K, H, S] on the devices in context.

    XLA's matmul on CPU reads the right side of q K^T in that order (1.24 to 1.43 times faster steps at
    320 and 1,024 tokens). On TPU XLA keeps the width innermost, and would copy such a cache at the entry
    and the exit of every program.
    """
    return _on_cpu()


def decode_layer(layers: Params, index: jax.Array, config: ModelConfig, *, int8: bool = False) -> Params:
    """Layer number `index` of the stacked `layers`, in the compute dtype, laid out for decoding.

    On a mesh its weights are split over `tensor` alone: a decode step then gathers no weights, which over
    `fsdp` it would do for every token. With `int8` the kernels are whole numbers of 8 bits and have a
    `scale` [out] beside them. On CPU they are `transposed` (see `decoder.linear`).
    """
    specs = weight_specs(config, head="lm")["layers"]

    def one(spec: WeightSpec, stacked: jax.Array) -> jax.Array:
        weight = jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)
        return _place(weight, config, spec.axes[1:])

    placed = jax.tree.map(one, specs, layers, is_leaf=is_spec)
    linear_maps = {name: weights for name, weights in placed.items() if isinstance(weights, dict)}
    if int8:
        linear_maps = {name: _to_int8(weights) for name, weights in linear_maps.items()}
    if _on_cpu():
        linear_maps = {name: _transposed(weights) for name, weights in linear_maps.items()}
    return {**placed, **linear_maps}


def decode_rest(rest: Params, config: ModelConfig) -> Params:
    """The weights outside of the layers, in the compute dtype, laid out for decoding like them.

    On CPU a head of its own is `lm_head_transposed` [V, D], as a tied one is anyway.
    """
    specs = weight_specs(config, head="lm")
    placed = {
        name: jax.tree.map(lambda s, w: _place(w, config, s.axes), specs[name], weight, is_leaf=is_spec)
        for name, weight in rest.items()
    }
    if "lm_head" in placed and _on_cpu():
        placed["lm_head_transposed"] = placed.pop("lm_head").T
    return placed


def _place(weight: jax.Array, config: ModelConfig, axes: tuple[str | None, ...]) -> jax.Array:
    # Where this mesh has other parts than the one that the weights were trained on, first into these: an
    # all-to-all. In one step XLA would gather the whole weight on every device.
    parted = constrain(weight.astype(config.compute_dtype), *axes)
    return constrain(parted, *[None if axis == "embed" else axis for axis in axes])


def _transposed(weights: Params) -> Params:
    rest = {name: weight for name, weight in weights.items() if name != "kernel"}
    return {**rest, "transposed": weights["kernel"].T}


def _to_int8(weights: Params) -> Params:
    """A linear map with its kernel [in, out] rounded to 8 bits, symmetrically, with one scale per output."""
    dtype, kernel = weights["kernel"].dtype, weights["kernel"].astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=0)
    scale = jnp.where(largest > 0, largest / 127, 1.0).astype(dtype)
    rounded = jnp.clip(jnp.round(kernel / scale.astype(jnp.float32)), -127, 127)
    return {**weights, "kernel": rounded.astype(jnp.int8), "scale": scale}


def empty_cache(config: ModelConfig, rows: int, cache_size: int) -> Cache:
    """A cache without a token."""
    heads, width, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    slots_last = _keys_slots_last()
    key = (width, cache_size) if slots_last else (cache_size, width)
    return Cache(
        keys=tuple(jnp.zeros((rows, heads, *key), config.compute_dtype) for _ in layers),
        values=tuple(jnp.zeros((rows, heads, cache_size, width), config.compute_dtype) for _ in layers),
        lengths=jnp.zeros(rows, jnp.int32),
        keys_slots_last=slots_last,
    )


def constrain_kv(x: jax.Array) -> jax.Array:
    """One array of a cache, keys or values, with its rows and kv heads split over the mesh."""
    return constrain(x, "batch", "act_kv_heads", None, None)


def constrain_cache(cache: Cache) -> Cache:
    """`cache` with its rows and kv heads split over the mesh."""
    return dataclasses.replace(
        cache,
        keys=tuple(map(constrain_kv, cache.keys)),
        values=tuple(map(constrain_kv, cache.values)),
        lengths=constrain(cache.lengths, "batch"),
    )


def prefill(
    weights: Params, config: ModelConfig, tokens: jax.Array, lengths: jax.Array, *, cache_size: int
) -> tuple[jax.Array, Cache]:
    """(state after the final norm of each row's last token [B, D], the cache of the prompts).

    `tokens` [B, P] are right-padded to P <= cache_size; `lengths` [B] >= 1. What the padding wrote is
    beyond `lengths`: never read, and overwritten by decoding.
    """
    prompt = tokens.shape[1]
    angles = rope_angles(config, jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), tokens.shape))
    x = constrain(embed_tokens(weights, config, tokens), "batch", "length", "act_embed")
    keys, values = [], []
    slots_last = _keys_slots_last()

    def by_head(x: jax.Array, *, slots_last: bool) -> jax.Array:
        """Of [B, P, K, H], with room for the tokens to come."""
        padded = jnp.pad(x, ((0, 0), (0, cache_size - prompt), (0, 0), (0, 0)))
        return jnp.transpose(padded, (0, 2, 3, 1) if slots_last else (0, 2, 1, 3))

    for layer in weights["layers"]:
        query, key, value = project_qkv(layer, config, x, angles)
        keys.append(by_head(key, slots_last=slots_last))
        values.append(by_head(value, slots_last=False))
        attended = attention(query, key, value, None, implementation=config.attention)
        x = finish_layer(layer, config, x, attended)
        x = constrain(x, "batch", "length", "act_embed")
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    hidden = rms_norm(last, weights["norm"], config.rms_norm_eps)
    cache = Cache(tuple(keys), tuple(values), lengths.astype(jnp.int32), slots_last)
    return hidden, constrain_cache(cache)


def decode_step(
    weights: Params, config: ModelConfig, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """(state after the final norm [B, D], cache) once `tokens` [B] have been appended to the rows."""
    kv_heads, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
    angles = rope_angles(config, cache.lengths)
    x = embed_tokens(weights, config, tokens)
    head = ("batch", "act_kv_heads", None)
    axes = ((*head, None), head, head, (*head, None), (*head, None), ("batch",))
    append_and_attend = functools.partial(_append_and_attend, keys_slots_last=cache.keys_slots_last)
    keys, values = [], []
    for layer, old_keys, old_values in zip(weights["layers"], cache.keys, cache.values):
        query, key, value = project_qkv(layer, config, x, angles)
        grouped = query.reshape(-1, kv_heads, groups, config.head_dim)
        arrays = (grouped, key, value, old_keys, old_values, cache.lengths)
        # On each device's rows and heads: the compiler would gather the cache, for the heads are an index.
        attended, new_keys, new_values = map_shards(append_and_attend, arrays, axes, like=(0, 3, 4))
        keys.append(new_keys)
        values.append(new_values)
        x = finish_layer(layer, config, x, attended)
    hidden = rms_norm(x, weights["norm"], config.rms_norm_eps)
    cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), lengths=cache.lengths + 1)
    return hidden, constrain_cache(cache)


def _append_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    keys_slots_last: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(attention's result [B, K, G, H], keys, values) once `key` and `value` [B, K, H] are at `lengths` [B].

    `query` is [B, K, G, H], the G query heads of each kv head; `keys` and `values` are as in `Cache`.
    """
    rows, heads = jnp.arange(key.shape[0])[:, None], jnp.arange(key.shape[1])[None, :]
    slot = lengths[:, None]
    in_place: Any = {"unique_indices": True, "mode": "promise_in_bounds"}
    key_at = (rows, heads, slice(None), slot) if keys_slots_last else (rows, heads, slot)
    keys = keys.at[key_at].set(key.astype(keys.dtype), **in_place)
    values = values.at[rows, heads, slot].set(value.astype(values.dtype), **in_place)
    product = "bkgh,bkhs->bkgs" if keys_slots_last else "bkgh,bksh->bkgs"
    scores = jnp.einsum(product, query, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(values.shape[2])[None, :] <= slot
    scores = jnp.where(visible[:, None, None], scores * query.shape[-1] ** -0.5, -1e30)
    probs = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", probs, values), keys, values
