"""What is read from the hidden states: next-token log-probs, entropy, logits, values. All float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import Params
from vcppo_jax.sharding import axis_shards, constrain

TOKENS_PER_CHUNK = 1024
"""Positions whose logits a device holds at once: 1024 x 152k x 4 bytes is 0.6 GiB, split over `tensor`."""


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """[..., V] float32 of `hidden` [..., D]; for a few positions only, never a whole [B, T] batch."""
    if config.tie_word_embeddings:
        kernel = params["embed"].astype(hidden.dtype)
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

    `hidden` [B, L, D] predicts `targets` [B, L]. The distribution is softmax(logits / temperature). The
    projection runs in chunks of `chunk` positions on each device, some of every row and of every part of the
    length, recomputed in the backward pass, so that [B, L, V] never exists.
    """
    batch, length, _ = hidden.shape
    parts = axis_shards("length") if length % axis_shards("length") == 0 else 1
    rows = -(-batch // axis_shards("batch"))
    width = max(1, min(length // parts, chunk // rows))
    chunks = -(-length // (parts * width))
    padding = chunks * width - length // parts

    def split(x: jax.Array) -> jax.Array:
        rest = x.shape[2:]
        padded = jnp.pad(
            x.reshape(batch, parts, -1, *rest), ((0, 0), (0, 0), (0, padding), *[(0, 0)] * len(rest))
        )
        chunked = jnp.moveaxis(padded.reshape(batch, parts, chunks, width, *rest), 2, 0)
        return constrain(chunked, None, "batch", "length", *[None] * (1 + len(rest)))

    @jax.checkpoint
    def one_chunk(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Two axes, and the parts of the length not among them: see decoder.linear.
        flat = hidden.reshape(-1, hidden.shape[-1]) if parts == 1 else hidden
        scores = logits(params, config, flat).reshape(*targets.shape, -1)
        scaled = constrain(scores / temperature, "batch", "length", None, "act_vocab")
        log_normaliser = jax.nn.logsumexp(scaled, axis=-1)
        chosen = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
        probs = jnp.exp(scaled - log_normaliser[..., None])
        return chosen - log_normaliser, log_normaliser - jnp.sum(probs * scaled, axis=-1)

    _, (logprobs, entropy) = jax.lax.scan(
        lambda carry, x: (carry, one_chunk(*x)), None, (split(hidden), split(targets))
    )

    def join(x: jax.Array) -> jax.Array:
        rows_first = jnp.moveaxis(x, 0, 2).reshape(batch, parts, chunks * width)
        return rows_first[:, :, : length // parts].reshape(batch, length)

    return join(logprobs), join(entropy)


def token_values(params: Params, hidden: jax.Array) -> jax.Array:
    """[B, L] float32, the value of the prefix that ends at each position."""
    score = params["score"]
    values = jnp.einsum(
        "...d,do->...o", hidden, score["kernel"].astype(hidden.dtype), preferred_element_type=jnp.float32
    )[..., 0]
    return values + score["bias"].astype(jnp.float32) if "bias" in score else values
