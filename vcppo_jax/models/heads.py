"""What is read from the hidden states: next-token log-probs, entropy, logits, values. All float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import Params
from vcppo_jax.sharding import add, gather, largest, map_shards, part

TOKENS_PER_CHUNK = 1024
"""Positions whose logits a device holds at once: 1024 x 152k x 4 bytes is 0.6 GiB, split over `tensor`."""


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """[..., V] float32 of `hidden` [..., D]; for a few positions only, never a whole [B, T] batch."""
    by_row = params["embed"] if config.tie_word_embeddings else params.get("lm_head_transposed")
    if by_row is not None:
        kernel = by_row.astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, kernel, preferred_element_type=jnp.float32)
    kernel = params["lm_head"].astype(hidden.dtype)
    return jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)


def token_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float,
    chunk: int = TOKENS_PER_CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy of its distribution), each [B, L] float32.

    `hidden` [B, L, D] predicts `targets` [B, L]. The distribution is softmax(logits / temperature). Each
    device projects its positions in chunks of `chunk`, recomputed in the backward pass, so that [B, L, V]
    never exists. The head is gathered over `fsdp` once for all chunks, and its gradient is summed over the
    devices once, where the compiler would do both for every chunk.
    """
    name, axes = (
        ("embed", ("vocab", "embed")) if config.tie_word_embeddings else ("lm_head", ("embed", "vocab"))
    )

    def on_shard(hidden: jax.Array, targets: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = axes.index("embed")
        if head.shape[at] < config.hidden_size:
            head = gather(head, "embed", whole=at)
        return _chunked_logprobs({name: head}, config, hidden, targets, temperature, chunk)

    arrays = (hidden, targets, params[name])
    return map_shards(on_shard, arrays, (("batch", "length", None), ("batch", "length"), axes), like=(1, 1))


def _chunked_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """`token_logprobs` of one device's positions; of the vocabulary the head may have this device's part."""
    count = targets.size
    width = max(1, min(count, chunk))
    chunks = -(-count // width)

    def split(x: jax.Array) -> jax.Array:
        rest = x.shape[2:]
        flat = jnp.pad(x.reshape(count, *rest), ((0, chunks * width - count), *[(0, 0)] * len(rest)))
        return flat.reshape(chunks, width, *rest)

    @jax.checkpoint
    def one_chunk(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        scaled = logits(params, config, hidden) / temperature
        if scaled.shape[-1] < config.vocab_size:
            return _parted_logprobs(scaled, targets)
        log_normaliser = jax.nn.logsumexp(scaled, axis=-1)
        chosen = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
        probs = jnp.exp(scaled - log_normaliser[..., None])
        return chosen - log_normaliser, log_normaliser - jnp.sum(probs * scaled, axis=-1)

    _, (logprobs, entropy) = jax.lax.scan(
        lambda carry, x: (carry, one_chunk(*x)), None, (split(hidden), split(targets))
    )

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[:count].reshape(targets.shape)

    return join(logprobs), join(entropy)


def _parted_logprobs(scaled: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-probs, entropies) [N] from this device's part [N, V / parts] of the logits."""
    highest = largest(jax.lax.stop_gradient(jnp.max(scaled, axis=-1)), "vocab")
    total = add(jnp.sum(jnp.exp(scaled - highest[:, None]), axis=-1), "vocab")
    log_normaliser = highest + jnp.log(total)
    size = scaled.shape[-1]
    local = targets - part("vocab") * size
    ours = (local >= 0) & (local < size)
    found = jnp.take_along_axis(scaled, jnp.clip(local, 0, size - 1)[:, None], axis=-1)[:, 0]
    chosen = add(jnp.where(ours, found, 0), "vocab")
    mean = add(jnp.sum(jnp.exp(scaled - log_normaliser[:, None]) * scaled, axis=-1), "vocab")
    return chosen - log_normaliser, log_normaliser - mean


def token_values(params: Params, hidden: jax.Array) -> jax.Array:
    """[B, L] float32, the value of the prefix that ends at each position."""
    score = params["score"]
    values = jnp.einsum(
        "...d,do->...o", hidden, score["kernel"].astype(hidden.dtype), preferred_element_type=jnp.float32
    )[..., 0]
    return values + score["bias"].astype(jnp.float32) if "bias" in score else values
