"""How many floating-point operations a model takes and a device can do: for model FLOPs utilisation.

Counted as in PaLM (arXiv 2204.02311, appendix B): what the model needs, so without recomputation and padding.
"""

from __future__ import annotations

import numpy as np

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.specs import count_parameters, weight_specs

BACKWARD = 2
"""A backward pass takes twice the operations of a forward pass."""
PEAK_TFLOPS = {
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6 lite": 918.0,
    "A100": 312.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense bfloat16 peak of one device, in 10^12 operations a second, by a part of `jax.Device.device_kind`; the
first match counts. From the vendors' data sheets."""


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


def peak_tflops(device_kind: str) -> float | None:
    """The peak of a device in 10^12 operations a second; None for one that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_kind), None)
