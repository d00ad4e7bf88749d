"""How many floating-point operations a model takes: for model FLOPs utilisation.

Counted as in PaLM (arXiv 2204.02311, appendix B): what the model needs, so without recomputation and padding.
"""

from __future__ import annotations

import numpy as np

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.specs import count_parameters, weight_specs

BACKWARD = 2
"""A backward pass takes twice the operations of a forward pass."""


def forward_flops(config: ModelConfig, lengths: np.ndarray, *, head: str) -> float:
    """Operations of one causal forward pass over sequences of these lengths (tokens, prompts included).

    `head` is "lm" or "value". A multiplication and an addition count as two. A token costs two for each
    weight that it goes through; attention, per layer, 2 x heads x head_dim x length^2 (scores and values, of
    which the causal mask leaves half).
    """
    lengths = np.asarray(lengths, np.float64)
    weights = count_parameters(weight_specs(config, head=head))
    embedding = config.vocab_size * config.hidden_size
    # The embedding is looked up, not multiplied, unless the policy's head shares it.
    if head == "value" or not config.tie_word_embeddings:
        weights -= embedding
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * float((lengths**2).sum())
    return 2.0 * weights * float(lengths.sum()) + attention
