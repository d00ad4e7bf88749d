"""Tiny configs of every family and random parameters (biases and norms too) for the model tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vcppo_jax.models.config import ModelConfig, model_config
from vcppo_jax.models.specs import is_spec, weight_specs

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "llama_tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama_llama3": {"model_type": "llama", **SIZES, "rope_theta": 1e4, "rope_scaling": LLAMA3},
    "llama_linear": {"model_type": "llama", **SIZES, "rope_theta": 1e4, "rope_scaling": LINEAR},
    "llama_biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16, "tie_word_embeddings": True},
}


def tiny_config(case: str, *, compute_dtype: str = "float32", remat: str = "none", **changes) -> ModelConfig:
    return model_config({**CONFIGS[case], **changes}, compute_dtype=compute_dtype, remat=remat)


def random_params(config: ModelConfig, *, head: str = "lm", head_bias: bool = False, seed: int = 0):
    """Drawn by NumPy, which compiles nothing; noise on every weight, so no bias, norm or head is neutral."""
    rng = np.random.default_rng(seed)

    def draw(spec) -> jax.Array:
        return jnp.asarray((spec.init == "ones") + 0.3 * rng.normal(size=spec.shape), jnp.float32)

    return jax.tree.map(draw, weight_specs(config, head=head, head_bias=head_bias), is_leaf=is_spec)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape).astype(np.int32)


def assert_trees_close(ours, theirs, **tolerance) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(
            np.asarray(leaf), np.asarray(other), err_msg=jax.tree_util.keystr(path), **tolerance
        )
