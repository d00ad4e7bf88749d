"""Causal attention within segments, with grouped queries, never materialising [L, L] at long L.

One function, `attention`, for training and scoring. Its blocked form scans over blocks of queries, each
recomputed in the backward pass, so that the scores in memory are [B, H, block, L].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

QUERY_BLOCK = 512
"""Queries whose scores exist at once; rows up to this long are computed in one piece."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    block: int = QUERY_BLOCK,
) -> jax.Array:
    """softmax(Q K^T / sqrt(H)) V: [B, L, N, H].

    `query` [B, L, N, H]; `key` and `value` [B, L, K, H] with N a multiple of K (query head n reads kv head
    n // (N / K)). A position attends to those at or before it with the same `segment_ids` [B, L] (all
    positions when None). Scores and softmax are float32.
    """
    length = query.shape[1]
    if length <= block:
        return _attend(query, key, value, segment_ids, jnp.int32(0), segment_ids)
    blocks = -(-length // block)
    padding = blocks * block - length

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one_block(start: jax.Array, queries: jax.Array, segments: jax.Array | None) -> jax.Array:
        return _attend(queries, key, value, segments, start, segment_ids)

    starts = jnp.arange(blocks, dtype=jnp.int32) * block
    segments = None if segment_ids is None else split(segment_ids)
    _, out = jax.lax.scan(lambda carry, x: (carry, one_block(*x)), None, (starts, split(query), segments))
    return jnp.moveaxis(out, 0, 1).reshape(query.shape[0], blocks * block, *query.shape[2:])[:, :length]


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array | None,
    start: jax.Array,
    key_segments: jax.Array | None,
) -> jax.Array:
    """Attention of the queries at positions `start`, `start` + 1, ... over all keys."""
    batch, queries, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores * head_dim**-0.5
    visible = (start + jnp.arange(queries))[:, None] >= jnp.arange(key.shape[1])[None, :]
    visible = visible[None]
    if query_segments is not None and key_segments is not None:
        visible = visible & (query_segments[:, :, None] == key_segments[:, None, :])
    # A finite bound: a row of a padded query block may see nothing and must not become NaN.
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights, value)
    return out.reshape(query.shape)
