"""Mesh and sharding rules: the only file that spells mesh axis names.

Arrays are described by *logical* axes ("embed", "batch", ...). One table, `RULES`, says over which mesh
axes each logical axis is split; every sharding in the project derives from it. `LAYOUTS` are the other ways
in which a network's weights may lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
"""From the one with the least traffic to the one with the most: neighbours along the last are closest."""
DCN_AXES = ("dcn_data", "dcn_fsdp")
"""Sizes over slices: the part of `data` and of `fsdp` that goes over the data centre's network (DCN).

`sequence` and `tensor` exchange activations in every layer and stay inside a slice (ICI).
"""
WEIGHT_AXES = ("fsdp", "tensor")
"""Mesh axes over which weights are split: `vcppo plan --search` tries sizes of these."""

# Logical axis -> mesh axes. An axis that is not split maps to ().
RULES: dict[str, tuple[str, ...]] = {
    # Weights. "embed" is the model dimension, split over fsdp and gathered layer by layer; the devices that
    # share a sequence share the weights, too.
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp", "sequence"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "norm": (),
    # Activations.
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "act_embed": (),
    "act_embed_looked_up": ("sequence",),
    "act_heads": ("tensor",),
    "act_kv_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}

LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp": {},
    "full": {"embed": ("data", "fsdp", "sequence")},
    "tensor": {"embed": ()},
    "replicated": {axis: () for axis in ("vocab", "embed", "heads", "kv_heads", "mlp")},
}
"""Name of `mesh.layout.*` -> the rules that differ for the weights of a network."""
DEFAULT_LAYOUT = "fsdp"


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `MESH_AXES`, of the sizes given (1 where not).

    With several slices an axis in `sizes` is its part inside a slice, and `dcn_data` or `dcn_fsdp` the part
    over slices: the mesh's axis is their product, the slices outermost. One of the former may be -1, which
    takes the devices that are left, and one of the latter, which takes the slices that are left. Devices are
    ordered as `jax.experimental.mesh_utils` does for the hardware; a slice is one of TPU, or of GPUs that
    NVLink joins (a host). Other devices are taken in their order, in as many parts as asked for.

    `devices` may be those of a described topology. Raises ValueError with the arithmetic spelled out when
    the sizes do not multiply to the number of devices, and those over slices to the number of slices.
    """
    known = (*MESH_AXES, *DCN_AXES)
    if unknown := set(sizes) - set(known):
        raise ValueError(f"mesh: unknown axes {sorted(unknown)}; the axes are {list(known)}")
    devices = jax.devices() if devices is None else list(devices)
    ici = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    dcn = {axis: sizes.get(axis, 1) for axis in DCN_AXES}
    for part in (ici, dcn):
        if any(n < 1 and n != -1 for n in part.values()) or list(part.values()).count(-1) > 1:
            raise ValueError(f"mesh: sizes are positive, and at most one is -1 (fill); got {_spelled(part)}")
    attribute, slices = _slices(devices, dcn)
    dcn = _filled(dcn, slices)
    across = math.prod(dcn.values())
    # Hosts of GPUs may be used as one slice, TPU slices may not: they have no common ICI.
    joined = across == 1 and devices[0].platform != "tpu"
    if devices[0].platform != "cpu" and across != slices and not joined:
        raise ValueError(
            f"mesh: {_spelled(dcn, ' x ')} = {across}, but the devices are in {slices} slices; change "
            "mesh.dcn_data (copies of the model) or mesh.dcn_fsdp so that the product matches"
        )
    ici = _filled(ici, len(devices) // across if len(devices) % across == 0 else 0)
    if across * math.prod(ici.values()) != len(devices):
        fixed = math.prod(n for n in ici.values() if n != -1)
        product = f"{fixed} x ?" if -1 in ici.values() else str(fixed)
        spelled = f"{_spelled(ici, ' x ')} = {product}"
        if across > 1:
            slices_spelled = f"{_spelled(dcn, ' x ')} = {across}"
            total = f"{across * fixed}" + (" x ?" if -1 in ici.values() else "")
            spelled = f"{spelled} in each slice, {slices_spelled} slices, {total} in all"
        raise ValueError(
            f"mesh: {spelled}, but there are {len(devices)} devices; "
            "change mesh.* so that the product matches"
        )
    over_slices = [dcn.get(f"dcn_{axis}", 1) for axis in MESH_AXES]
    arranged = _arrange(list(ici.values()), over_slices, devices, attribute)
    return Mesh(arranged, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _spelled(sizes: Mapping[str, int], separator: str = ", ") -> str:
    """The sizes in words: "data 2 x fsdp 4" or "data=2, fsdp=4"."""
    sign = "=" if separator == ", " else " "
    return separator.join(f"{axis}{sign}{n}" for axis, n in sizes.items())


def _filled(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`sizes` with -1 replaced so that the product is `total`, where that can be."""
    fixed = math.prod(n for n in sizes.values() if n != -1)
    if not total or total % fixed:
        return dict(sizes)
    return {axis: total // fixed if n == -1 else n for axis, n in sizes.items()}


def _slices(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> tuple[str, int]:
    """(the attribute that tells slices apart, how many there are).

    JAX's index of slices where the devices have one. GPUs may be divided by process, too, where that is what
    `sizes` ask for: the devices of a described topology all say that they are in slice 0.
    """
    indexed, tpu = getattr(devices[0], "slice_index", None) is not None, devices[0].platform == "tpu"
    attributes = ["slice_index"] if indexed else ["platform"] if tpu else []
    attributes += [] if tpu else ["process_index"]
    counts = {name: len({getattr(device, name) for device in devices}) for name in attributes}
    asked = math.prod(sizes.values())
    name = next((name for name, count in counts.items() if count == asked), attributes[0])
    return name, counts[name]


def _arrange(ici: list[int], dcn: list[int], devices: Sequence[jax.Device], attribute: str) -> np.ndarray:
    """The devices as an array of shape ici * dcn, neighbours where the traffic is."""
    if devices[0].platform == "cpu":
        order = np.arange(2 * len(ici)).reshape(2, -1).T.reshape(-1)  # dcn, ici, dcn, ici, ...
        parts = np.asarray(devices).reshape(*dcn, *ici).transpose(order)
        return parts.reshape([over * inside for over, inside in zip(dcn, ici)])
    try:
        if math.prod(dcn) == 1:
            return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(
            ici,
            dcn,
            devices,
            process_is_granule=attribute == "process_index",
            allow_split_physical_axes=True,
        )
    except NotImplementedError as error:
        raise ValueError(
            f"mesh: {'x'.join(map(str, ici))} does not fit the chips' network: {error}"
        ) from None


def rollout_mesh(mesh: Mesh, tensor: int | None) -> Mesh:
    """The same devices for generation: `tensor` (as in `mesh` when None) of them share a copy of the weights.

    No axis is left for the length, of which a decode step has one position: `fsdp`, `sequence` and `tensor`
    are divided anew into rows and `tensor`. Raises ValueError where that does not come out even.
    """
    shape = dict(mesh.shape)
    tensor = shape["tensor"] if tensor is None else tensor
    inner = shape["fsdp"] * shape["sequence"] * shape["tensor"]
    if tensor < 1 or inner % tensor:
        raise ValueError(
            f"mesh.decode_tensor={tensor} does not divide fsdp {shape['fsdp']} x sequence "
            f"{shape['sequence']} x tensor {shape['tensor']} = {inner}"
        )
    devices = mesh.devices.reshape(shape["data"], inner // tensor, 1, tensor)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    layout: str = DEFAULT_LAYOUT,
) -> PartitionSpec:
    """The partition spec of an array with these logical axes, by `RULES` and what `layout` changes in them.

    With `shape` and `mesh`, a dimension that its mesh axes do not divide stays whole (a head of width
    1, a vocabulary of odd size), since every array that enters a jitted function must divide evenly.
    """
    rules = RULES | LAYOUTS[layout]
    entries: list[tuple[str, ...] | None] = []
    for i, axis in enumerate(axes):
        names = rules[axis] if axis is not None else ()
        if shape is not None and mesh is not None:
            parts = math.prod(mesh.shape[name] for name in names)
            if shape[i] % parts:
                names = ()
        entries.append(names or None)
    return PartitionSpec(*entries)


def named_sharding(
    mesh: Mesh,
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    *,
    layout: str = DEFAULT_LAYOUT,
) -> NamedSharding:
    """`NamedSharding` of an array with these logical axes; `shape` and `layout` as in `partition_spec`."""
    return NamedSharding(mesh, partition_spec(axes, shape, mesh, layout=layout))


def constrain(x: jax.Array, *axes: str | None, layout: str = DEFAULT_LAYOUT) -> jax.Array:
    """Hint inside a jitted function: `x` has these logical axes. Without a mesh in context, a no-op.

    The mesh is the one of `jax.set_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, layout=layout))


def map_shards(
    function: Callable[..., Any],
    arrays: Sequence[jax.Array],
    axes: Sequence[Sequence[str | None]],
    like: int | tuple[int, ...] = 0,
) -> Any:
    """`function(*arrays)`, run on each device's own part of the arrays, which have these logical axes.

    For what the compiler cannot partition. The result is split like array number `like`, results like theirs
    each. A dimension that does not divide stays whole, as in `partition_spec`. Without a mesh in
    context, a plain call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arrays)
    specs = tuple(partition_spec(names, x.shape, mesh) for names, x in zip(axes, arrays))
    results = specs[like] if isinstance(like, int) else tuple(specs[i] for i in like)
    # Kernels do not say over which axes their results vary, so that cannot be checked.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return mapped(*arrays)


def exchange(x: jax.Array, axis: str, *, whole: int, split: int) -> jax.Array:
    """Inside `map_shards`: all-to-all among the devices that a logical axis is split over.

    Dimension `whole`, of which each of them holds a part, becomes whole, and dimension `split` is split.
    """
    return jax.lax.all_to_all(x, RULES[axis], split_axis=split, concat_axis=whole, tiled=True)


def gather(x: jax.Array, axis: str, *, whole: int) -> jax.Array:
    """Inside `map_shards`: all-gather of dimension `whole` among the devices that a logical axis is over."""
    return jax.lax.all_gather(x, RULES[axis], axis=whole, tiled=True)


def add(x: jax.Array, axis: str) -> jax.Array:
    """Inside `map_shards`: the sum over the devices that a logical axis is split over."""
    return jax.lax.psum(x, RULES[axis])


def largest(x: jax.Array, axis: str) -> jax.Array:
    """Inside `map_shards`: the maximum over the devices that a logical axis is split over."""
    return jax.lax.pmax(x, RULES[axis])


def part(axis: str) -> jax.Array:
    """Inside `map_shards`: which part of a logical axis this device has, from 0."""
    return jax.lax.axis_index(RULES[axis])


def axis_shards(axis: str) -> int:
    """Into how many parts the mesh in context splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in RULES[axis])


def context_device() -> jax.Device | jax.sharding.AbstractDevice:
    """A device like those of the mesh in context, which need not be attached; else JAX's default one.

    It has a `platform` ("cpu", "gpu", "tpu") and a `device_kind`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None:
        return jax.devices()[0]
    return mesh.abstract_device


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the batch axis is split."""
    return math.prod(mesh.shape[name] for name in RULES["batch"])


def length_shards(mesh: Mesh) -> int:
    """Into how many parts the length axis is split."""
    return math.prod(mesh.shape[name] for name in RULES["length"])


def put(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """NumPy arrays, the same in every process, on the devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    # device_put would send every array to the other processes, to see that it is the same there.
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index]),
        tree,
    )


def to_host(tree: Any) -> Any:
    """Whole NumPy arrays, also of what other processes hold parts of; all processes must call it together.

    The mesh is the one of `jax.set_mesh`.
    """
    leaves, structure = jax.tree.flatten(tree)
    spread = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _is_here(x)]
    if spread:
        whole = jax.jit(_same, out_shardings=PartitionSpec())([leaves[i] for i in spread])
        for i, x in zip(spread, whole):
            leaves[i] = x
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def _same(x: Any) -> Any:
    return x
