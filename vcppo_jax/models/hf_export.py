"""Policies and value models as Hugging Face directories that transformers loads.

A directory is written under another name next to its place and renamed when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from vcppo_jax.models.config import ModelConfig, model_config
from vcppo_jax.models.hf_files import INDEX, SINGLE, read_json
from vcppo_jax.models.hf_load import hf_shape, hf_tensors, spec_leaves
from vcppo_jax.models.networks import Policy, ValueModel
from vcppo_jax.models.specs import weight_specs

EXPORT_DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CLASS_PREFIX = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}

# Fields of the config in which the source directory may differ from the model to export.
NOT_ARCHITECTURE = ("compute_dtype", "remat", "attention", "initializer_range", "eos_token_ids")

# What makes up a tokenizer and the generation defaults, in every version of transformers.
COPIED_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

Tensor = tuple[str, jax.Array, int | None, bool]
"""Hugging Face name, weight, layer to take from it (None: all), whether to transpose."""


def export_policy(
    policy: Policy,
    out_dir: str | Path,
    *,
    source_dir: str | Path | None,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write `policy` as a directory for `AutoModelForCausalLM.from_pretrained`; the path is returned.

    config.json starts from that of `source_dir` (the directory that the policy was loaded from), whose
    tokenizer and generation_config are copied; with None, config.json is made from `policy.config` and there
    is no tokenizer. `dtype` ("float32", "bfloat16") is that of the saved weights. Weights that exceed
    `max_shard_bytes` are spread over several files with an index; one shard is in host memory at a time.

    Raises ValueError if `out_dir` exists and is not empty, if `source_dir` describes another model, or if
    `dtype` is unknown; OSError if it cannot be written, and then nothing is left.
    """
    config = policy.config
    hf_config = _hf_config(config, source_dir, f"{CLASS_PREFIX[config.family]}ForCausalLM", dtype)
    tensors = _tensors(policy.params, weight_specs(config, head="lm"))
    return _write(Path(out_dir), hf_config, tensors, source_dir, dtype, max_shard_bytes)


def export_value_model(
    value_model: ValueModel,
    out_dir: str | Path,
    *,
    source_dir: str | Path | None,
    kind: Literal["token", "sequence"] = "token",
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write `value_model` as a classifier with one label, whose head is `score`; the path is returned.

    As "token" it is a directory for `AutoModelForTokenClassification` (one value per position, what a
    value model computes; a head without bias gets a zero one, which that class has). As "sequence" it is
    for `AutoModelForSequenceClassification` (the value at the last token, as reward models are kept); that
    class has no bias, so a head with one raises ValueError. The rest is as in `export_policy`.
    """
    classes = {"token": "ForTokenClassification", "sequence": "ForSequenceClassification"}
    if kind not in classes:
        raise ValueError(f"export_value_model: kind is one of {sorted(classes)}, got {kind!r}")
    config, params = value_model.config, dict(value_model.params)
    has_bias = "bias" in params["score"]
    if kind == "sequence" and has_bias:
        raise ValueError(
            "export_value_model: *ForSequenceClassification has no head bias, and this value model has one; "
            'use kind="token"'
        )
    if kind == "token" and not has_bias:
        params["score"] = {**params["score"], "bias": jax.numpy.zeros((1,))}
    hf_config = _hf_config(config, source_dir, CLASS_PREFIX[config.family] + classes[kind], dtype)
    # One label; and no dropout before the head, which would default to 0.1 in training.
    hf_config |= {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}, "classifier_dropout": 0.0}
    tensors = _tensors(params, weight_specs(config, head="value", head_bias="bias" in params["score"]))
    return _write(Path(out_dir), hf_config, tensors, source_dir, dtype, max_shard_bytes)


def _hf_config(
    config: ModelConfig, source_dir: str | Path | None, architecture: str, dtype: str
) -> dict[str, Any]:
    """The contents of config.json. Raises ValueError if that of `source_dir` is of another model."""
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"export: dtype is one of {sorted(EXPORT_DTYPES)}, got {dtype!r}")
    source = None if source_dir is None else Path(source_dir) / "config.json"
    if source is not None and source.is_file():
        hf_config = read_json(source)
        theirs = dataclasses.asdict(model_config(source))
        ours = dataclasses.asdict(config)
        other = [key for key in ours if key not in NOT_ARCHITECTURE and ours[key] != theirs[key]]
        if other:
            raise ValueError(
                f"{source}: describes another model: {other[0]} is {theirs[other[0]]!r}, that of the weights "
                f"to export is {ours[other[0]]!r}; give the directory that they were loaded from"
            )
    else:
        hf_config = _config_from_scratch(config)
    for key in ("quantization_config", "_name_or_path", "auto_map"):
        hf_config.pop(key, None)
    # "torch_dtype" is what transformers 4 reads, "dtype" what transformers 5 does.
    return hf_config | {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}


def _config_from_scratch(config: ModelConfig) -> dict[str, Any]:
    """config.json made from our own config, in the keys of transformers 4 and 5."""
    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    hf_config = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "eos_token_id": list(config.eos_token_ids) or None,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }
    if config.family == "llama":
        hf_config |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.family == "qwen3":
        hf_config |= {"attention_bias": config.qkv_bias}
    return hf_config


def _tensors(params: Any, specs: Any) -> list[tuple[Tensor, int]]:
    """All tensors to write, in the specs' order, with their number of elements."""
    tensors: list[tuple[Tensor, int]] = []
    for weight, spec in zip(jax.tree.leaves(params), spec_leaves(specs), strict=True):
        if weight.shape != tuple(spec.shape):
            raise ValueError(f"export: {spec.hf_name} has shape {weight.shape}, the config says {spec.shape}")
        size = int(np.prod(hf_shape(spec)))
        tensors += [((name, weight, layer, spec.transpose), size) for name, layer in hf_tensors(spec)]
    return tensors


def _shards(tensors: list[tuple[Tensor, int]], itemsize: int, max_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, cut where a file would exceed `max_bytes` (a larger tensor gets its own file)."""
    shard: list[Tensor] = []
    used = 0
    for tensor, size in tensors:
        if shard and used + size * itemsize > max_bytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += size * itemsize
    yield shard


def _to_host(tensor: Tensor, dtype: Any) -> np.ndarray:
    """One tensor as it stands in the file: a layer of its weight, gathered, transposed and cast."""
    _, weight, layer, transpose = tensor
    array = np.asarray(weight if layer is None else weight[layer])
    return np.ascontiguousarray(array.T if transpose else array, dtype=dtype)


def _write(
    out_dir: Path,
    hf_config: dict[str, Any],
    tensors: list[tuple[Tensor, int]],
    source_dir: str | Path | None,
    dtype: str,
    max_shard_bytes: int,
) -> Path:
    """Write the directory next to its place, then rename it; `out_dir` is returned."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"{out_dir} exists and is not an empty directory; choose another one or remove it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        if source_dir is not None:
            for name in COPIED_FILES:
                if (Path(source_dir) / name).is_file():
                    shutil.copyfile(Path(source_dir) / name, made / name)
        config_file = made / "config.json"
        config_file.write_text(json.dumps(hf_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _write_weights(made, tensors, dtype, max_shard_bytes)
        for file in made.glob("*.safetensors"):
            shutil.copymode(config_file, file)  # safetensors makes files that only their owner may read
        os.replace(made, out_dir)
    return out_dir


def _write_weights(folder: Path, tensors: list[tuple[Tensor, int]], dtype: str, max_shard_bytes: int) -> None:
    """The safetensors files, and their index if there are several."""
    np_dtype = np.dtype(EXPORT_DTYPES[dtype])
    shards = list(_shards(tensors, np_dtype.itemsize, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {tensor[0]: _to_host(tensor, np_dtype) for tensor in shard}
        try:
            save_file(arrays, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            code = re.search(r"\(os error (\d+)\)", str(error))  # Rust's spelling
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder / file)) from error
        weight_map |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        total = sum(size for _, size in tensors) * np_dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
