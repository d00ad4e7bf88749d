"""Causal attention within segments by blocks of queries, in plain XLA: for CPU, and where no kernel computes.

As in FlashAttention (arXiv 2205.14135, 2307.08691) the backward pass computes the scores again, from the
inputs and the logarithm of each query's normaliser, so that only those of a block of queries ever exist. All
products keep the order [.., queries, keys]: XLA's CPU backend copies what has to be transposed.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

QUERY_BLOCK = 128
"""Queries at a time. On CPU 64 to 256 are about as fast, whole rows of 512 take twice the time."""
KEY_SPANS = 4
"""Queries in the first 1/4 of a row are given 1/4 of the keys, and so on: 5/8 of the work."""


def blocked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    block: int | None = None,
    spans: int = KEY_SPANS,
) -> jax.Array:
    """`attention.attention` by `block` queries at a time, by default `QUERY_BLOCK`.

    The queries of each of `spans` parts of the row are given the keys up to its end. The scores in memory
    are [B, N, block, L].
    """
    rows, length, heads, width = query.shape
    kv_heads = key.shape[2]
    block = min(QUERY_BLOCK if block is None else block, length)
    padding = ((0, 0), (0, -length % block))
    padded = jnp.pad(query, (*padding, (0, 0), (0, 0)))
    segments = None if segment_ids is None else jnp.pad(segment_ids, padding)
    grouped = padded.reshape(*padded.shape[:2], kv_heads, heads // kv_heads, width)
    out = _attend(
        jnp.transpose(grouped, (0, 2, 3, 1, 4)),
        jnp.swapaxes(key, 1, 2),
        jnp.swapaxes(value, 1, 2),
        segments,
        block,
        spans,
    )
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(rows, -1, heads, width)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, block: int, spans: int
) -> jax.Array:
    """[B, K, G, P, H] from `query` of that shape, `key` and `value` [B, K, L, H] and `segments` [B, P].

    P is L rounded up to whole blocks: the last queries may be padding.
    """
    return _forward(query, key, value, segments, block, spans)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, block: int, spans: int
) -> tuple[jax.Array, Any]:
    """(the result, what the backward pass needs)."""
    outs, log_totals = [], []
    for start, stop in _bounds(query.shape[3], block, spans):
        keys, values = key[:, :, :stop], value[:, :, :stop]

        def one_block(_: None, first: jax.Array, keys: Any = keys, values: Any = values) -> tuple[None, Any]:
            scores = _scores(_part(query, first, block), keys, segments, first)
            highest = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - highest)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            out = _by_keys(weights.astype(value.dtype), values) / total
            return None, (out.astype(query.dtype), highest + jnp.log(total))

        _, (out, log_total) = jax.lax.scan(one_block, None, jnp.arange(start, stop, block, dtype=jnp.int32))
        outs.append(_joined(out))
        log_totals.append(_joined(log_total))
    out = jnp.concatenate(outs, axis=3)
    return out, (query, key, value, segments, out, jnp.concatenate(log_totals, axis=3))


def _backward(block: int, spans: int, saved: Any, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, segments, out, log_total = saved
    # The softmax's gradient takes from each weight's the mean over its query's weights, which is d_out . out.
    mean = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_key, d_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    d_queries = []
    for start, stop in _bounds(query.shape[3], block, spans):
        keys, values = key[:, :, :stop], value[:, :, :stop]

        def one_block(sums: Any, first: jax.Array, keys: Any = keys, values: Any = values) -> tuple[Any, Any]:
            parts = (_part(x, first, block) for x in (query, d_out, log_total, mean))
            queries, d_outs, log_totals, means = parts
            weights = jnp.exp(_scores(queries, keys, segments, first) - log_totals)
            d_weights = _by_width(d_outs, values)
            d_scores = weights * (d_weights - means) * query.shape[-1] ** -0.5
            d_scores = d_scores.astype(query.dtype)
            d_keys = sums[0] + _by_query(d_scores, queries)
            d_values = sums[1] + _by_query(weights.astype(value.dtype), d_outs)
            return (d_keys, d_values), _by_keys(d_scores, keys).astype(query.dtype)

        sums = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
        sums, d_query = jax.lax.scan(one_block, sums, jnp.arange(start, stop, block, dtype=jnp.int32))
        d_key, d_value = (x.at[:, :, :stop].add(more) for x, more in zip((d_key, d_value), sums))
        d_queries.append(_joined(d_query))
    d_query = jnp.concatenate(d_queries, axis=3)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


def _bounds(length: int, block: int, spans: int) -> list[tuple[int, int]]:
    """(first query, end) of each part of `length` queries, in whole blocks."""
    blocks = length // block
    spans = min(spans, blocks)
    return list(itertools.pairwise(blocks * i // spans * block for i in range(spans + 1)))


def _part(x: jax.Array, first: jax.Array, block: int) -> jax.Array:
    """The queries `first` to `first` + `block` of [B, K, G, P, *]."""
    return jax.lax.dynamic_slice_in_dim(x, first, block, axis=3)


def _joined(x: jax.Array) -> jax.Array:
    """[B, K, G, n x block, *] from the blocks [n, B, K, G, block, *]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def _scores(query: jax.Array, key: jax.Array, segments: jax.Array | None, first: jax.Array) -> jax.Array:
    """[B, K, G, block, S] float32, of the queries from `first` on."""
    scores = _by_width(query, key) * query.shape[-1] ** -0.5
    block, keys = scores.shape[-2:]
    visible = ((first + jnp.arange(block))[:, None] >= jnp.arange(keys)[None, :])[None]
    if segments is not None:
        query_segments = jax.lax.dynamic_slice_in_dim(segments, first, block, axis=1)
        visible = visible & (query_segments[:, :, None] == segments[:, None, :keys])
    # A finite bound: a padded query may see nothing and must not become NaN.
    return jnp.where(visible[:, None, None], scores, -1e30)


def _by_width(x: jax.Array, y: jax.Array) -> jax.Array:
    """[B, K, G, Q, S] float32, from `x` [B, K, G, Q, H] and `y` [B, K, S, H]."""
    product = jnp.matmul(_flat(x), jnp.swapaxes(y, 2, 3), preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:4], y.shape[2])


def _by_keys(x: jax.Array, y: jax.Array) -> jax.Array:
    """[B, K, G, Q, H] float32, from `x` [B, K, G, Q, S] and `y` [B, K, S, H]."""
    product = jnp.matmul(_flat(x), y, preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:4], y.shape[3])


def _by_query(x: jax.Array, y: jax.Array) -> jax.Array:
    """[B, K, S, H] float32, from `x` [B, K, G, Q, S] and `y` [B, K, G, Q, H]."""
    return jnp.matmul(jnp.swapaxes(_flat(x), 2, 3), _flat(y), preferred_element_type=jnp.float32)


def _flat(x: jax.Array) -> jax.Array:
    """[B, K, G x Q, *]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
