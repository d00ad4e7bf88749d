"""What `generate` is asked for, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.rollout.sampling import Sampling


def check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, sampling: Sampling) -> None:
    """ValueError, naming the prompt, for one that cannot be continued by max_new_tokens tokens."""
    if len(prompts) == 0:
        raise ValueError("generate: expected at least one prompt, got none")
    room = config.max_position_embeddings - sampling.max_new_tokens
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"generate: prompt {i} is empty; expected at least one token (such as a BOS)")
        if len(prompt) > room:
            raise ValueError(
                f"generate: prompt {i} has {len(prompt)} tokens; {config.max_position_embeddings} positions "
                f"less max_new_tokens = {sampling.max_new_tokens} leave room for {room}; shorten one of them"
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"generate: prompt {i} has token ids {min(prompt)}..{max(prompt)}; "
                f"the vocabulary is 0..{config.vocab_size - 1}"
            )


def per_row(
    name: str, numbers: Sequence[int] | np.ndarray, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> np.ndarray:
    """[P * n] int64, or ValueError."""
    array, count = np.asarray(numbers, np.int64), len(prompts) * sampling.n
    if array.shape != (count,):
        raise ValueError(
            f"generate: {name}: expected {count} numbers ({len(prompts)} prompts x n = {sampling.n}), "
            f"got shape {array.shape}"
        )
    return array
