"""The decoder of Llama, Qwen2/2.5 and Qwen3: pure functions over the parameters of `specs`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vcppo_jax.models.attention import attention
from vcppo_jax.models.config import ModelConfig, RopeConfig
from vcppo_jax.sharding import axis_shards, constrain

Params = Any
FEW_ROWS = 64
"""Up to so many rows, decoding on CPU multiplies from the left (`_decoding_product`)."""

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis (arXiv 1910.07467), computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32 radians per position.

    "llama3" divides the frequencies whose wavelength exceeds the original context by `factor`, keeps those
    well inside it, and blends between (Llama 3.1; the formula of transformers' `rope_type: llama3`).
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies.astype(np.float32)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) float32 of each position and frequency: [..., 1, head_dim / 2]."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config.rope, config.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`x` [..., N, H] rotated in the planes (i, i + H/2), in float32, in x's dtype."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def linear(weights: Params, x: jax.Array) -> jax.Array:
    """x @ kernel + bias in x's dtype; master weights are cast here, so no cast copy of the model exists.

    As a product of two matrices: XLA's CPU backend takes twice as long for the weight's gradient when it
    contracts two axes of `x`. Not where the length is split: parts of rows are no part of all positions.
    """
    flat = x if axis_shards("length") > 1 else x.reshape(-1, x.shape[-1])
    if "transposed" in weights:  # of those for decoding on CPU
        y = _decoding_product(weights["transposed"].astype(x.dtype), flat)
    else:
        y = flat @ weights["kernel"].astype(x.dtype)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    if "scale" in weights:  # of the 8-bit kernels that decoding may use
        y = y * weights["scale"]
    return y + weights["bias"].astype(x.dtype) if "bias" in weights else y


def _decoding_product(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """x times the transpose of `kernel` [out, in], fast for few rows on CPU.

    XLA takes a few rows of `x` at a time and reads the weights anew for each few, unless the weights are the
    left side. A token's linear maps take 0.68 of the time at 8 rows and 0.75 at 32 with AVX2, 0.9 at 8 and
    the same at 32 with AVX-512; with 128 rows nothing is won.
    """
    if x.ndim > 2 or x.shape[0] > FEW_ROWS:
        return x @ kernel.T
    # Without the barrier XLA would swap the sides back.
    return jax.lax.optimization_barrier(kernel @ x.T).T


def project_qkv(
    layer: Params, config: ModelConfig, x: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [..., N, H], rotated keys and values [..., K, H] of the residual `x` [..., D]."""
    normed = rms_norm(x, layer["attention_norm"], config.rms_norm_eps)

    def heads(name: str, count: int) -> jax.Array:
        return linear(layer[name], normed).reshape(*x.shape[:-1], count, config.head_dim)

    query, key = heads("query", config.num_heads), heads("key", config.num_kv_heads)
    if config.qk_norm:
        query = rms_norm(query, layer["query_norm"], config.rms_norm_eps)
        key = rms_norm(key, layer["key_norm"], config.rms_norm_eps)
    return rotate(query, angles), rotate(key, angles), heads("value", config.num_kv_heads)


def finish_layer(layer: Params, config: ModelConfig, x: jax.Array, attended: jax.Array) -> jax.Array:
    """The residual stream after a layer, from the attention's result [..., N, H]."""
    x = x + linear(layer["out"], attended.reshape(*x.shape[:-1], -1))
    normed = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    gated = jax.nn.silu(linear(layer["gate"], normed)) * linear(layer["up"], normed)
    return x + linear(layer["down"], gated)


def embed_tokens(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """[..., D] in the compute dtype."""
    return params["embed"][tokens].astype(config.compute_dtype)


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """The states after the final norm, [B, L, D] in the compute dtype.

    `tokens` [B, L] int32. Positions count from 0 (in each segment, when `segment_ids` are given) unless
    given. A token attends to the tokens at or before it in its segment. The layers run in one `lax.scan`
    under `jax.checkpoint` with the policy `config.remat`.
    """
    if positions is None:
        positions = segment_positions(tokens, segment_ids)
    angles = rope_angles(config, positions)
    # The table's parts of the width become parts of the rows, then of the length: two all-to-alls. In one
    # step XLA would give every device the whole micro-batch.
    x = constrain(embed_tokens(params, config, tokens), "batch", None, "act_embed_looked_up")
    x = constrain(x, "batch", "length", "act_embed")

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        query, key, value = project_qkv(layer, config, x, angles)
        query = constrain(query, "batch", "length", "act_heads", "head_dim")
        key = constrain(key, "batch", "length", "act_kv_heads", "head_dim")
        attended = attention(query, key, value, segment_ids, implementation=config.attention)
        x = finish_layer(layer, config, x, attended)
        return constrain(x, "batch", "length", "act_embed"), None

    if config.remat != "none":
        layer_step = jax.checkpoint(layer_step, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
    x, _ = jax.lax.scan(layer_step, x, params["layers"])
    return rms_norm(x, params["norm"], config.rms_norm_eps)


def segment_positions(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """int32 positions of `tokens` [B, L] that restart at 0 where `segment_ids` change."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        return index
    changed = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    starts = jax.lax.cummax(jnp.where(changed, index, 0), axis=1)
    return index - starts
