"""Policies and value models from Hugging Face directories, read straight into the devices' shards.

Each shard of each weight reads its own slices of the memory-mapped files, so the host never holds more
than one shard at a time beside what the devices hold. Loading is strict: see `hf_files`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from vcppo_jax.models.config import ModelConfig, model_config
from vcppo_jax.models.hf_files import CheckpointError, CheckpointFiles, check_directory, check_names
from vcppo_jax.models.networks import Policy, ValueModel
from vcppo_jax.models.specs import WeightSpec, init_params, is_spec, param_shardings, weight_specs
from vcppo_jax.sharding import DEFAULT_LAYOUT

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# Where value and reward models keep their scalar head: transformers' classifiers (also verl's critic)
# use `score`, TRL `v_head.summary` or `v_head`, OpenRLHF `value_head` (or `score`).
HEAD_NAMES = ("score", "v_head.summary", "v_head", "value_head")


@dataclasses.dataclass(frozen=True)
class HeadInfo:
    """Whether the scalar head of a value model was loaded, and from which tensor."""

    loaded: bool
    tensor: str | None
    """Name of the head's weight in the checkpoint; None if the head is new."""
    bias: bool

    def __str__(self) -> str:
        with_bias = "with bias" if self.bias else "without bias"
        return f"loaded from {self.tensor} ({with_bias})" if self.loaded else f"new ({with_bias})"


def load_policy(
    path: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
    layout: str = DEFAULT_LAYOUT,
    param_dtype: DTypeLike = "float32",
) -> Policy:
    """The policy in a Hugging Face directory of a *ForCausalLM model.

    `compute_dtype` ("float32", "bfloat16"), `remat` ("none", "full", "dots") and `attention` ("auto" or one
    of `attention.IMPLEMENTATIONS`) are run-time choices kept in the config; `param_dtype` is that of the
    master weights, whatever the file holds. With a mesh the weights are sharded as `layout` of
    `sharding.LAYOUTS` says, without one they are on the default device.

    Raises CheckpointError, naming file and tensor, when the directory is not a complete and exact
    checkpoint, and ValueError when config.json describes an architecture that is not supported.
    """
    path = Path(path)
    check_directory(path)
    config = model_config(path, compute_dtype=compute_dtype, remat=remat, attention=attention)
    specs = weight_specs(config, head="lm")
    with CheckpointFiles(path) as files:
        expected = expected_shapes(specs)
        harmless = {}
        if config.tie_word_embeddings:
            harmless[LM_HEAD] = "a copy of the embedding, saved by some versions of transformers"
        check_names(files, expected, harmless)
        if config.tie_word_embeddings and LM_HEAD in files.names:
            _check_tied_copy(files, expected[EMBEDDING])
        params = _read_params(files, specs, {}, mesh, np.dtype(param_dtype), layout)
    return Policy(params=params, config=config)


def load_value_model(
    path: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
    layout: str = DEFAULT_LAYOUT,
    param_dtype: DTypeLike = "float32",
    head_bias: bool = False,
) -> tuple[ValueModel, HeadInfo]:
    """The value model in a Hugging Face directory, and whether its scalar head was loaded or is new.

    The directory holds a causal LM (its `lm_head` is not read), a sequence or token classifier with one
    label, or a critic of TRL, OpenRLHF or verl. A head that is found (`HEAD_NAMES`) keeps its bias or
    absence of one; otherwise there is a new one (zero, see `specs`), with a bias if `head_bias`. The other
    arguments and errors are those of `load_policy`; a head with more than one label is an error too.
    """
    path = Path(path)
    check_directory(path)
    config = model_config(path, compute_dtype=compute_dtype, remat=remat, attention=attention)
    dtype = np.dtype(param_dtype)
    with CheckpointFiles(path) as files:
        head = _find_head(files, config)
        bias = head_bias if head is None else f"{head}.bias" in files.names
        specs = weight_specs(config, head="value", head_bias=bias)
        rename = {}
        if head is not None:
            rename = {f"score.{part}": f"{head}.{part}" for part in ("weight", "bias")}
        loaded_specs = specs if head is not None else {k: v for k, v in specs.items() if k != "score"}
        harmless = {LM_HEAD: "the head of the policy that this value model starts from"}
        check_names(files, expected_shapes(loaded_specs, rename), harmless)
        params = _read_params(files, loaded_specs, rename, mesh, dtype, layout)
    if head is None:
        params["score"] = _new_head(specs["score"], mesh, dtype, layout)
    info = HeadInfo(loaded=head is not None, tensor=None if head is None else f"{head}.weight", bias=bias)
    return ValueModel(params=params, config=config), info


def hf_tensors(spec: WeightSpec) -> list[tuple[str, int | None]]:
    """Hugging Face name and layer (None: not stacked) of each tensor that makes up one weight."""
    if "{layer}" not in spec.hf_name:
        return [(spec.hf_name, None)]
    return [(spec.hf_name.format(layer=layer), layer) for layer in range(spec.shape[0])]


def hf_shape(spec: WeightSpec) -> tuple[int, ...]:
    """Shape of each of `hf_tensors(spec)`: without the layer axis, [out, in] if transposed."""
    shape = spec.shape[1:] if "{layer}" in spec.hf_name else spec.shape
    return tuple(reversed(shape)) if spec.transpose else tuple(shape)


def spec_leaves(specs: Any) -> list[WeightSpec]:
    """The specs of a tree, in the order of `jax.tree.leaves` of the parameters."""
    return jax.tree.leaves(specs, is_leaf=is_spec)


def expected_shapes(specs: Any, rename: dict[str, str] | None = None) -> dict[str, tuple[int, ...]]:
    """Name in the checkpoint -> shape there, of every tensor of the specs."""
    rename = rename or {}
    return {
        rename.get(name, name): hf_shape(spec) for spec in spec_leaves(specs) for name, _ in hf_tensors(spec)
    }


def _read_params(
    files: CheckpointFiles,
    specs: Any,
    rename: dict[str, str],
    mesh: Mesh | None,
    dtype: np.dtype,
    layout: str,
) -> dict[str, Any]:
    """The parameters, read weight by weight and shard by shard; the nested dict has the specs' structure.

    Each transfer is waited for: an asynchronous one would keep its host copy alive while the next is read.
    """

    def read(spec: WeightSpec, index: tuple[slice, ...]) -> np.ndarray:
        return _read_slice(files, spec, index, rename, dtype)

    if mesh is None:
        return jax.tree.map(
            lambda spec: jax.block_until_ready(jax.device_put(read(spec, (slice(None),) * len(spec.shape)))),
            specs,
            is_leaf=is_spec,
        )
    return jax.tree.map(
        lambda spec, sharding: _sharded(lambda index: read(spec, index), spec.shape, sharding),
        specs,
        param_shardings(specs, mesh, layout),
        is_leaf=is_spec,
    )


def _read_slice(
    files: CheckpointFiles,
    spec: WeightSpec,
    index: tuple[slice, ...],
    rename: dict[str, str],
    dtype: np.dtype,
) -> np.ndarray:
    """One slice of a weight (in its own index space), each stored tensor sliced before it is copied."""
    bounds = [part.indices(size) for part, size in zip(index, spec.shape)]
    index = tuple(slice(start, stop) for start, stop, _ in bounds)
    out = np.empty([stop - start for start, stop, _ in bounds], dtype)
    stacked = "{layer}" in spec.hf_name
    inner = index[1:] if stacked else index
    first, last = (index[0].start, index[0].stop) if stacked else (0, 1)
    tensors = hf_tensors(spec)
    for row in range(first, last):
        name = tensors[row][0]
        stored = files.read(rename.get(name, name), inner[::-1] if spec.transpose else inner)
        target = out[row - first] if stacked else out
        target[...] = stored.T if spec.transpose else stored
    return out


def _sharded(read: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """An array whose distinct shards are each read once, placed on every device that wants them, and dropped.

    `jax.make_array_from_callback` would read a shard again for each replica.
    """
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        shard = read(tuple(slice(start, stop) for start, stop in bounds))
        pieces += jax.block_until_ready([jax.device_put(shard, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _check_tied_copy(files: CheckpointFiles, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless `lm_head.weight` equals the embedding that config.json ties it to."""
    rows = max(1, 2**24 // shape[1])

    def block(start: int) -> tuple[slice, ...]:
        return slice(start, min(start + rows, shape[0])), slice(0, shape[1])

    found = files.shape(LM_HEAD)
    same = found == shape and all(
        np.array_equal(files.read(LM_HEAD, block(start)), files.read(EMBEDDING, block(start)))
        for start in range(0, shape[0], rows)
    )
    if not same:
        raise CheckpointError(
            f"{files.where(LM_HEAD)}: tensor {LM_HEAD} differs from {EMBEDDING}, but config.json ties them; "
            "set tie_word_embeddings to false if the model has a head of its own"
        )


def _find_head(files: CheckpointFiles, config: ModelConfig) -> str | None:
    """The prefix under which the checkpoint keeps its scalar head, or None."""
    heads = [head for head in HEAD_NAMES if f"{head}.weight" in files.names]
    if not heads:
        return None
    if len(heads) > 1:
        raise CheckpointError(
            f"{files.path}: expected one value head, found {' and '.join(f'{h}.weight' for h in heads)}"
        )
    name = f"{heads[0]}.weight"
    shape = files.shape(name)
    if shape != (1, config.hidden_size):
        labels = f", which is {shape[0]} labels; a value model has one" if len(shape) == 2 else ""
        raise CheckpointError(
            f"{files.where(name)}: tensor {name} has shape {list(shape)}{labels}; "
            f"expected [1, {config.hidden_size}] (num_labels 1)"
        )
    return heads[0]


def _new_head(specs: Any, mesh: Mesh | None, dtype: np.dtype, layout: str) -> Any:
    """A scalar head as the specs initialise it (no draw: zeros), placed like the other parameters."""
    head = init_params(specs, jax.random.key(0), mesh, layout=layout)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), head)
