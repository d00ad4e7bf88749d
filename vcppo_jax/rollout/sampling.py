"""Sampling rules: from logits and keys to tokens and their log-probs. Everything is float32.

Randomness is a key per sample and position: `fold_in(fold_in(key, sample id), t)`, so a token does not
depend on which batch, slot or order its sample ran in. A draw costs two uniforms a row, not one per
vocabulary entry: the inverse of the distribution function is taken first over blocks of the vocabulary,
then inside the chosen block, so no cumulative sum runs over the whole vocabulary and rounding stays
relative to the block.
"""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are sampled; hashable, checked when built (ValueError names the field and value).

    Filters apply after the temperature, in the order top-k, top-p, min-p, as in transformers. A filter
    that is off costs nothing.
    """

    max_new_tokens: int
    """Length limit of a response, in tokens, EOS included."""
    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy: argmax, ties to the lowest id."""
    top_k: int | None = 0
    """Keep the k likeliest tokens, and those tied with the k-th; 0 or None is off."""
    top_p: float = 1.0
    """Keep tokens while the mass of strictly likelier ones is below it (at least one); 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest; 0 is off."""
    n: int = 1
    """Samples per prompt."""

    def __post_init__(self) -> None:
        def check(name: str, kind: type, ok: bool, expected: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not ok:
                raise ValueError(f"Sampling.{name}: expected {expected}, got {value!r}")

        def within(value: object, low: float, high: float) -> bool:
            return isinstance(value, Real) and low <= float(value) <= high

        for name in ("max_new_tokens", "n"):
            check(name, Integral, within(getattr(self, name), 1, math.inf), "an integer of at least 1")
        temperature_ok = within(self.temperature, 0, math.inf) and self.temperature != math.inf
        check("temperature", Real, temperature_ok, "a finite number of at least 0 (0 is greedy)")
        if self.top_k is not None:
            check("top_k", Integral, within(self.top_k, 0, math.inf), "an integer of at least 0 (0 is off)")
        check("top_p", Real, within(self.top_p, 0, 1) and self.top_p != 0, "a number in (0, 1] (1 is off)")
        check("min_p", Real, within(self.min_p, 0, 1), "a number in [0, 1] (0 is off)")


def sample_keys(key: jax.Array, sample_ids: jax.Array) -> jax.Array:
    """[B] keys, one per sample: `fold_in(key, sample id)`."""
    return jax.vmap(lambda sample_id: jax.random.fold_in(key, sample_id))(sample_ids)


def token_uniforms(keys: jax.Array, steps: jax.Array) -> jax.Array:
    """[B, 2] float32 uniforms in [0, 1) that the samples `keys` [B] use at their token indices `steps` [B].

    Token t of a sample uses the key `fold_in(sample key, t)`.
    """

    def at(key: jax.Array, step: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, step), (2,), jnp.float32)

    return jax.vmap(at)(keys, steps)


def sample_token(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """One token per row and its log-prob, as `choose_token`, from one key per row.

    `keys` [B] are used as they are; token t of a sample has the key `fold_in(sample key, t)`.
    """
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(keys)
    return choose_token(logits, uniforms, sampling)


def choose_token(logits: jax.Array, uniforms: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """(tokens [B] int32, log-probs [B] float32) from logits [B, V] and uniforms [B, 2] in [0, 1).

    The log-prob is that of the token under the temperature-scaled softmax over the full vocabulary,
    before top-k, top-p and min-p: the quantity that the trainer's `logprobs(temperature=T)` computes,
    so that the ratio at the first update is 1. At temperature 0 it is the log-prob at temperature 1.
    A token of probability zero is never drawn.
    """
    logits = logits.astype(jnp.float32)
    scaled = logits / sampling.temperature if sampling.temperature > 0 else logits
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    if sampling.temperature > 0:
        tokens = _draw(filter_weights(scaled, weights, sampling), uniforms)
    else:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)
    log_total = jnp.log(jnp.sum(weights, axis=-1, keepdims=True))
    return tokens, (chosen - peak - log_total)[:, 0]


def filter_weights(scaled: jax.Array, weights: jax.Array, sampling: Sampling) -> jax.Array:
    """`weights` [B, V] (softmax numerators, largest 1) with 0 where top-k, top-p or min-p drops."""
    top_k_on = sampling.top_k is not None and 0 < sampling.top_k < scaled.shape[-1]
    if not top_k_on and sampling.top_p == 1 and sampling.min_p == 0:
        return weights
    kept = weights
    if top_k_on:
        order = _order_bits(scaled)
        threshold = _threshold(order, jnp.ones_like(weights), jnp.float32(sampling.top_k))
        kept = jnp.where(order >= threshold, kept, 0.0)
    if sampling.top_p < 1:
        order = _order_bits(scaled)
        mass = sampling.top_p * jnp.sum(kept, axis=-1, keepdims=True)
        kept = jnp.where(order >= _threshold(order, kept, mass), kept, 0.0)
    if sampling.min_p > 0:
        kept = jnp.where(weights >= sampling.min_p, kept, 0.0)
    return kept


def _order_bits(x: jax.Array) -> jax.Array:
    """uint32 that order as the float32 `x` do; equal floats give equal bits (-0.0 is 0.0)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(order: jax.Array, mass: jax.Array, limit: jax.Array) -> jax.Array:
    """[B, 1]: the smallest of `order` [B, V] such that the mass of strictly larger ones is below `limit`.

    That is the largest t with mass(order >= t) >= limit, built bit by bit: 32 masked sums, exact, and
    far cheaper than a sort of the vocabulary. Entries equal to the threshold all stay, so ties never
    depend on a sort's order.
    """

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        above = jnp.sum(jnp.where(order >= candidate, mass, 0.0), axis=-1, keepdims=True)
        return jnp.where(above >= limit, candidate, threshold)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros_like(order[:, :1]))


def _draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """[B] int32: an index per row, with probability in proportion to `weights` [B, V] >= 0."""
    rows, vocab = weights.shape
    width = 1 << math.ceil(math.log2(max(vocab, 2)) / 2)
    blocks = -(-vocab // width)
    blocked = jnp.pad(weights, ((0, 0), (0, blocks * width - vocab))).reshape(rows, blocks, width)
    block = _invert(jnp.sum(blocked, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocked, block[:, None, None], axis=1)[:, 0]
    return block * width + _invert(inside, uniforms[:, 1])


def _invert(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """[B] int32: the first index at which the running sum of `mass` [B, N] exceeds uniform x total.

    Only an index with mass counts. Where rounding leaves none (uniform next to 1), the largest is taken.
    """
    running = jnp.cumsum(mass, axis=-1)
    hit = (running > uniform[:, None] * running[:, -1:]) & (mass > 0)
    index = jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), jnp.argmax(mass, axis=-1))
    return index.astype(jnp.int32)
