"""Pytrees that cross module borders.

Notation everywhere: B sequences, T response tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import jax
from flax import struct


@struct.dataclass
class Rollout:
    """Sampled responses. Rows are in the order of the prompts, the n samples of a prompt adjacent."""

    tokens: jax.Array
    """[B, T] int32, response tokens only (the prompt is not repeated), EOS included, then padding."""
    lengths: jax.Array
    """[B] int32, the number of response tokens, EOS included."""
    logprobs: jax.Array
    """[B, T] float32, log-prob of each sampled token; 0 where padded."""
    truncated: jax.Array
    """[B] bool, True where the length limit cut the response (its last token is then no EOS)."""


@struct.dataclass
class Experience:
    """What one rollout batch gives to the updates; all [B, T] float32, 0 where the mask is 0.

    `values[t]`, like `logprobs[t]`, is read at the position *before* response token t.
    """

    mask: jax.Array
    """1 on response tokens, EOS included."""
    old_logprobs: jax.Array
    ref_logprobs: jax.Array
    rewards: jax.Array
    """The score (and token-level penalties) per token; the score sits on the last response token."""
    values: jax.Array
    advantages: jax.Array
    returns: jax.Array


@struct.dataclass
class PackedBatch:
    """Sequences packed into rows; every field is [..., R, L] with the same leading axes.

    Per-token fields sit at the position that *predicts* the token: `logprob(targets[p])` is read from
    the hidden state of position p. Where `weights` is 0 nothing is learned.
    """

    tokens: jax.Array
    """int32 input tokens."""
    positions: jax.Array
    """int32, restarting at 0 in each sequence."""
    segment_ids: jax.Array
    """int32, 1, 2, ... per row; 0 is padding."""
    targets: jax.Array
    """int32, the next token of the same sequence; 0 where there is none."""
    mask: jax.Array
    """float32, 1 where the target is a response token."""
    fields: dict[str, jax.Array]
    """float32 per-token inputs of the loss by name: weights, advantages, old_logprobs, ..."""
