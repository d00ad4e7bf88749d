"""The static shapes that a configuration gives to the compiled programs, in training and in `vcppo plan`."""

from __future__ import annotations

from jax.sharding import Mesh

from vcppo_jax.config import Config
from vcppo_jax.data.packing import PackShape, pack_shape
from vcppo_jax.sharding import batch_shards, length_shards


def packed_shape(config: Config, mesh: Mesh, max_response_tokens: int, sequences: int) -> PackShape:
    """The packed shape for so many sequences, each at most a prompt and `max_response_tokens` long."""
    longest = config.data.max_prompt_tokens + max_response_tokens
    return pack_shape(
        sequences=sequences,
        row_tokens=max(config.train.row_tokens or 0, longest),
        micro_batch_tokens=config.train.micro_batch_tokens,
        shards=batch_shards(mesh),
        length_shards=length_shards(mesh),
    )
