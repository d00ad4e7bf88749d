"""One table per architecture: each weight's shape, logical axes, initialiser and Hugging Face name.

Parameters, their shardings, initial values, counts and the tensors of a checkpoint all derive from it.
Layer weights are stacked, the layer axis first; every kernel is [in, out] (Hugging Face's transposed).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.sharding import DEFAULT_LAYOUT, named_sharding


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One weight; a leaf of the spec tree, whose structure is that of the parameters."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axes, see `sharding.RULES`."""
    init: str
    """"normal" (of `std`), "ones" or "zeros"."""
    hf_name: str
    """With {layer} where the weight is stacked over layers."""
    transpose: bool
    """Whether the checkpoint holds it [out, in]."""
    std: float = 0.0


def weight_specs(config: ModelConfig, *, head: str, head_bias: bool = False) -> dict[str, Any]:
    """The specs of a decoder with a "lm" head (none of its own if tied) or a scalar "value" head.

    A new value head is zero: V is then 0 everywhere, the neutral start, and not the random function of
    the prefix that a drawn kernel would give to the first advantages.
    """
    d = config.hidden_size
    std = config.initializer_range
    specs: dict[str, Any] = {
        "embed": WeightSpec(
            (config.vocab_size, d), ("vocab", "embed"), "normal", "model.embed_tokens.weight", False, std
        ),
        "layers": _layer_specs(config),
        "norm": WeightSpec((d,), ("norm",), "ones", "model.norm.weight", False),
    }
    if head == "value":
        specs["score"] = {"kernel": WeightSpec((d, 1), ("embed", None), "zeros", "score.weight", True)}
        if head_bias:
            specs["score"]["bias"] = WeightSpec((1,), (None,), "zeros", "score.bias", False)
    elif head != "lm":
        raise ValueError(f"head: expected 'lm' or 'value', got {head!r}")
    elif not config.tie_word_embeddings:
        specs["lm_head"] = WeightSpec(
            (d, config.vocab_size), ("embed", "vocab"), "normal", "lm_head.weight", True, std
        )
    return specs


def _layer_specs(config: ModelConfig) -> dict[str, Any]:
    n, d, f = config.num_layers, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = "model.layers.{layer}."

    def norm(name: str, size: int, axis: str) -> WeightSpec:
        return WeightSpec((n, size), ("layers", axis), "ones", f"{prefix}{name}.weight", False)

    def linear(name: str, axis_in: str, axis_out: str, size: tuple[int, int], bias: bool) -> dict[str, Any]:
        axes = ("layers", axis_in, axis_out)
        weight = f"{prefix}{name}.weight"
        layer = {"kernel": WeightSpec((n, *size), axes, "normal", weight, True, config.initializer_range)}
        if bias:
            out = "norm" if axis_out == "embed" else axis_out
            layer["bias"] = WeightSpec((n, size[1]), ("layers", out), "zeros", f"{prefix}{name}.bias", False)
        return layer

    layers: dict[str, Any] = {
        "attention_norm": norm("input_layernorm", d, "norm"),
        "query": linear("self_attn.q_proj", "embed", "heads", (d, q), config.qkv_bias),
        "key": linear("self_attn.k_proj", "embed", "kv_heads", (d, kv), config.qkv_bias),
        "value": linear("self_attn.v_proj", "embed", "kv_heads", (d, kv), config.qkv_bias),
        "out": linear("self_attn.o_proj", "heads", "embed", (q, d), config.attention_out_bias),
        "mlp_norm": norm("post_attention_layernorm", d, "norm"),
        "gate": linear("mlp.gate_proj", "embed", "mlp", (d, f), config.mlp_bias),
        "up": linear("mlp.up_proj", "embed", "mlp", (d, f), config.mlp_bias),
        "down": linear("mlp.down_proj", "mlp", "embed", (f, d), config.mlp_bias),
    }
    if config.qk_norm:
        layers["query_norm"] = norm("self_attn.q_norm", config.head_dim, "head_dim")
        layers["key_norm"] = norm("self_attn.k_norm", config.head_dim, "head_dim")
    return layers


def is_spec(node: Any) -> bool:
    """Whether a node of a spec tree is a leaf."""
    return isinstance(node, WeightSpec)


def _init_weight(spec: WeightSpec, key: jax.Array) -> jax.Array:
    """float32; the key is folded with the weight's name, so other weights do not change its draw."""
    if spec.init == "ones":
        return jnp.ones(spec.shape, jnp.float32)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, jnp.float32)
    key = jax.random.fold_in(key, zlib.crc32(spec.hf_name.encode()))
    return spec.std * jax.random.normal(key, spec.shape, jnp.float32)


def init_params(specs: Any, key: jax.Array, mesh: Mesh | None = None, *, layout: str = DEFAULT_LAYOUT) -> Any:
    """New float32 parameters; with a mesh each device computes its own shards (of `layout`) only."""

    def draw(key: jax.Array) -> Any:
        return jax.tree.map(lambda spec: _init_weight(spec, key), specs, is_leaf=is_spec)

    shardings = None if mesh is None else param_shardings(specs, mesh, layout)
    return jax.jit(draw, out_shardings=shardings)(key)


def param_shardings(specs: Any, mesh: Mesh, layout: str = DEFAULT_LAYOUT) -> Any:
    """The `NamedSharding` of every parameter; `layout` is one of `sharding.LAYOUTS`."""
    return jax.tree.map(
        lambda spec: named_sharding(mesh, spec.axes, spec.shape, layout=layout), specs, is_leaf=is_spec
    )


def count_parameters(specs: Any) -> int:
    """The number of parameters."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))
