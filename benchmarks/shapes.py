"""Models in the shapes of SmolLM2-135M with weights that are made here, as Hugging Face directories.

`random` weights are drawn as transformers initialises them. `counting` weights make the model count: after
token i it gives i + 1 a probability that is 1 in float32, whatever came before, at the price of the same
matrix products. A prompt that ends in token EOS - n is then continued by exactly n tokens, EOS included, so
that each sample's length can be prescribed to any library through its ordinary EOS.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""SmolLM2-135M's config.json."""

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""For `--quick`."""

COUNTING_LOGIT = 60.0
"""Logit of the next number; the others have a standard deviation of this over sqrt(hidden_size)."""


def config_json(shapes: dict[str, int], *, tied: bool) -> dict[str, object]:
    """A Llama's config.json.

    The base of the rotary embedding is the one that Tunix 0.1.7 uses for every Llama.
    """
    return shapes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def write_model(out: Path, shapes: dict[str, int], *, counting: bool) -> Path:
    """Write the directory `out` with counting or random weights; it is returned."""
    rng = np.random.default_rng(0)
    hidden, vocab, head = shapes["hidden_size"], shapes["vocab_size"], shapes["head_dim"]
    queries, keys = shapes["num_attention_heads"] * head, shapes["num_key_value_heads"] * head

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return scale * rng.standard_normal(shape, np.float32)

    def closing(*shape: int) -> np.ndarray:
        """A matrix whose product is added to the residual stream, which counting leaves as it is."""
        return np.zeros(shape, np.float32) if counting else normal(*shape)

    embedding = normal(vocab, hidden, scale=1.0 if counting else 0.02)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(shapes["num_hidden_layers"]):
        weights = {
            "self_attn.q_proj": normal(queries, hidden),
            "self_attn.k_proj": normal(keys, hidden),
            "self_attn.v_proj": normal(keys, hidden),
            "self_attn.o_proj": closing(hidden, queries),
            "mlp.gate_proj": normal(shapes["intermediate_size"], hidden),
            "mlp.up_proj": normal(shapes["intermediate_size"], hidden),
            "mlp.down_proj": closing(hidden, shapes["intermediate_size"]),
            "input_layernorm": np.ones(hidden, np.float32),
            "post_attention_layernorm": np.ones(hidden, np.float32),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": x for name, x in weights.items()}
    if counting:
        # Row j answers to the embedding of j - 1, which the last norm has scaled to hidden_size ** 0.5.
        tensors["lm_head.weight"] = np.roll(embedding, 1, axis=0) * (COUNTING_LOGIT / hidden)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config_json(shapes, tied=not counting)))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
