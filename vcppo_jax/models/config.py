"""The architecture of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), with the scalings that Llama models use."""

    kind: str
    """"default", "linear" (positions divided by `factor`) or "llama3"."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder with grouped-query attention and a SwiGLU MLP; hashable, static under jit."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    """Ids that config.json and generation_config.json name; the tokenizer's may add to them."""
    compute_dtype: str
    """Run-time choice: "float32" or "bfloat16", the type of the matmuls."""
    remat: str
    """Run-time choice: "none", "full" or "dots", what the backward pass computes again."""
    attention: str = "auto"
    """Run-time choice: "auto" or one of `attention.IMPLEMENTATIONS`."""


def model_config(
    source: str | Path | Mapping[str, Any],
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
) -> ModelConfig:
    """The architecture of a Hugging Face directory, its config.json, or that file's contents.

    transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) spellings are read. Raises
    ValueError, naming the key, for anything that this decoder does not compute: other model types,
    unknown rope types, mixtures of experts, sliding-window layers that are switched on.
    """
    _check_choice("compute_dtype", compute_dtype, ("float32", "bfloat16"))
    _check_choice("remat", remat, ("none", "full", "dots"))
    _check_choice("attention", attention, ("auto", "blocked", "cudnn", "splash"))
    hf, where = _read(source)
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; expected one of {', '.join(FAMILIES)}"
        )
    _refuse_other_layers(hf, where)
    heads = _integer(hf, "num_attention_heads", where)
    hidden = _integer(hf, "hidden_size", where)
    kv_heads = _integer(hf, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act {hf['hidden_act']!r} is not supported; expected 'silu'")
    attention_bias = bool(hf.get("attention_bias", False))
    max_positions = _integer(hf, "max_position_embeddings", where)
    return ModelConfig(
        family=family,
        vocab_size=_integer(hf, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(hf, "intermediate_size", where),
        num_layers=_integer(hf, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(hf, 128 if family == "qwen3" else hidden // heads, where),
        rms_norm_eps=_positive(hf, "rms_norm_eps", where, 1e-6),
        rope=_rope(hf, max_positions, where),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        attention_out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(hf.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        initializer_range=_positive(hf, "initializer_range", where, 0.02),
        eos_token_ids=_eos_ids(source, hf),
        compute_dtype=compute_dtype,
        remat=remat,
        attention=attention,
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(contents).__name__}")
    return contents, str(file)


def _integer(hf: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = default if hf.get(key) is None else hf[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key}: expected a positive integer, got {value!r}")
    return value


def _positive(hf: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = default if hf.get(key) is None else hf[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{where}: {key}: expected a positive number, got {value!r}")
    return float(value)


def _head_dim(hf: Mapping[str, Any], default: int, where: str) -> int:
    head_dim = _integer(hf, "head_dim", where, default)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim: expected an even number (rotary embedding), got {head_dim}")
    return head_dim


def _refuse_other_layers(hf: Mapping[str, Any], where: str) -> None:
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(key)]
    if experts:
        raise ValueError(f"{where}: {experts[0]}: mixtures of experts are not supported; use a dense model")
    if hf.get("use_sliding_window"):
        raise ValueError(
            f"{where}: use_sliding_window: sliding-window layers are not supported; expected false"
        )
    kinds = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ValueError(
            f"{where}: layer_types: {kinds[0]!r} is not supported; expected only 'full_attention'"
        )


def _rope(hf: Mapping[str, Any], max_positions: int, where: str) -> RopeConfig:
    """The rope of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{where}: {key}: expected an object, got {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"{where}: {key}: rope type {kind!r} is not supported; expected one of {', '.join(ROPE_KINDS)}"
        )
    partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor {partial} is not supported; expected 1.0")
    theta = _positive({**hf, **scaling}, "rope_theta", where, 10_000.0)
    if kind == "default":
        return RopeConfig("default", theta)
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for name in needed:
        if name not in scaling:
            raise ValueError(f"{where}: {key}.{name} is missing; rope type {kind!r} needs it")
    numbers: dict[str, Any] = {name: _positive(scaling, name, f"{where}: {key}") for name in needed}
    if kind == "linear":
        return RopeConfig("linear", theta, **numbers)
    original = _integer(scaling, "original_max_position_embeddings", f"{where}: {key}", default=max_positions)
    return RopeConfig("llama3", theta, **numbers, original_max_position_embeddings=original)


def _eos_ids(source: str | Path | Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[int, ...]:
    values = [hf.get("eos_token_id")]
    if not isinstance(source, Mapping):
        path = Path(source)
        generation = (path if path.is_dir() else path.parent) / "generation_config.json"
        if generation.is_file():
            values.append(_read(generation)[0].get("eos_token_id"))
    ids: set[int] = set()
    for value in values:
        ids |= set(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
