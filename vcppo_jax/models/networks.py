"""The two networks of actor-critic training, and the functions that read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import Params, hidden_states
from vcppo_jax.models.heads import token_logprobs, token_values


@struct.dataclass
class Policy:
    """A language model: a pytree of parameters (see `specs`) with a static config."""

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)


@struct.dataclass
class ValueModel:
    """A decoder with a scalar head; shares no weights with the policy."""

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)


def logprobs(
    policy: Policy,
    tokens: ArrayLike,
    *,
    temperature: float = 1.0,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """[B, T-1] float32, the log-prob of `tokens[:, 1:]` [B, T] under softmax(logits / temperature).

    Right-padding needs no mask: what follows a token does not change its log-prob. With `segment_ids`
    [B, T] (packing; equal ids are one sequence, 0 by convention padding) positions restart in each segment,
    tokens see their own segment only, and the entry of a segment's first token means nothing.
    Raises ValueError unless temperature > 0.
    """
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ValueError(f"logprobs: temperature: expected a positive number, got {temperature}")
    tokens, segments = _as_batch(tokens, segment_ids)
    hidden = hidden_states(policy.params, policy.config, tokens, segment_ids=segments)
    return token_logprobs(
        policy.params, policy.config, hidden[:, :-1], tokens[:, 1:], temperature=temperature
    )[0]


def values(value_model: ValueModel, tokens: ArrayLike, *, segment_ids: ArrayLike | None = None) -> jax.Array:
    """[B, T] float32, the value of the prefix that ends at each position of `tokens` [B, T].

    The value before response token t of a prompt of P tokens is entry P - 1 + t, where the log-prob of
    that token is read too. `segment_ids` as in `logprobs`.
    """
    tokens, segments = _as_batch(tokens, segment_ids)
    hidden = hidden_states(value_model.params, value_model.config, tokens, segment_ids=segments)
    return token_values(value_model.params, hidden)


def _as_batch(tokens: ArrayLike, segment_ids: ArrayLike | None) -> tuple[jax.Array, jax.Array | None]:
    batch = jnp.asarray(tokens, jnp.int32)
    if batch.ndim != 2:
        raise ValueError(f"tokens: expected shape [B, T], got {list(batch.shape)}")
    segments = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    if segments is not None and segments.shape != batch.shape:
        raise ValueError(f"segment_ids: expected shape {list(batch.shape)}, got {list(segments.shape)}")
    return batch, segments
