"""Mesh and sharding rules: the only file that spells mesh axis names.

Arrays are described by *logical* axes ("embed", "batch", ...). One table, `RULES`, says over which mesh
axes each logical axis is split; every sharding in the project derives from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")
WEIGHT_AXES = ("fsdp", "tensor")
"""Mesh axes over which weights are split: `vcppo plan --search` tries sizes of these."""

# Logical axis -> mesh axes. An axis that is not split maps to ().
RULES: dict[str, tuple[str, ...]] = {
    # Weights. "embed" is the model dimension, split over fsdp and gathered layer by layer.
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "norm": (),
    # Activations.
    "batch": ("data", "fsdp"),
    "length": (),
    "act_embed": (),
    "act_heads": ("tensor",),
    "act_kv_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `MESH_AXES`; at most one size is -1 and takes the devices that are left.

    Raises ValueError with the arithmetic spelled out when the sizes do not multiply to the number
    of devices.
    """
    unknown = set(sizes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"mesh: unknown axes {sorted(unknown)}; the axes are {list(MESH_AXES)}")
    devices = jax.devices() if devices is None else list(devices)
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    bad = [f"{axis}={n}" for axis, n in zip(MESH_AXES, shape) if n < 1 and n != -1]
    if bad or shape.count(-1) > 1:
        raise ValueError(
            f"mesh: sizes are positive, and at most one is -1 (fill); got "
            f"{', '.join(f'{axis}={n}' for axis, n in zip(MESH_AXES, shape))}"
        )
    fixed = math.prod(n for n in shape if n != -1)
    if -1 in shape and len(devices) % fixed == 0:
        shape[shape.index(-1)] = len(devices) // fixed
    spelled = " x ".join(f"{axis} {n}" for axis, n in zip(MESH_AXES, shape))
    if math.prod(shape) != len(devices):
        product = f"{fixed} x ?" if -1 in shape else str(math.prod(shape))
        raise ValueError(
            f"mesh: {spelled} = {product}, but there are {len(devices)} devices; "
            "change mesh.* so that the product matches"
        )
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int] | None = None, mesh: Mesh | AbstractMesh | None = None
) -> PartitionSpec:
    """The partition spec of an array with these logical axes.

    With `shape` and `mesh`, a dimension that its mesh axes do not divide stays whole (a head of width
    1, a vocabulary of odd size), since every array that enters a jitted function must divide evenly.
    """
    entries: list[tuple[str, ...] | None] = []
    for i, axis in enumerate(axes):
        names = RULES[axis] if axis is not None else ()
        if shape is not None and mesh is not None:
            parts = math.prod(mesh.shape[name] for name in names)
            if shape[i] % parts:
                names = ()
        entries.append(names or None)
    return PartitionSpec(*entries)


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int] | None = None
) -> NamedSharding:
    """`NamedSharding` of an array with these logical axes; `shape` as in `partition_spec`."""
    return NamedSharding(mesh, partition_spec(axes, shape, mesh))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Hint inside a jitted function: `x` has these logical axes. Without a mesh in context, a no-op.

    The mesh is the one of `jax.set_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))


def map_shards(
    function: Callable[..., jax.Array], arrays: Sequence[jax.Array], axes: Sequence[Sequence[str | None]]
) -> jax.Array:
    """`function(*arrays)`, run on each device's own part of the arrays, which have these logical axes.

    For kernels that the compiler cannot partition. The result is split like the first array. A dimension
    that does not divide stays whole, as in `partition_spec`. Without a mesh in context, a plain call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arrays)
    specs = tuple(partition_spec(names, x.shape, mesh) for names, x in zip(axes, arrays))
    # Kernels do not say over which axes their results vary, so that cannot be checked.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return mapped(*arrays)


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
