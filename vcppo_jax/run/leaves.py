"""A training state as named arrays: `actor/params/layers/q/kernel`, the form in which checkpoints hold it.

Names come from the state's own keys, so a checkpoint does not depend on the Python classes of the state, and
a part of it is everything below a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath


def named_leaves(tree: Any) -> dict[str, Any]:
    """Name -> leaf, in the order of `jax.tree.leaves(tree)`.

    Raises ValueError where a key holds the separator "/" or two leaves get one name.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        name = "/".join(keys)
        if any("/" in key for key in keys) or name in named:
            raise ValueError(f"checkpoint state: leaf {name!r}: keys must be unique and free of '/'")
        named[name] = leaf
    return named


def check_arrays(named: Mapping[str, Any]) -> None:
    """Raises TypeError that names the first leaf which is no array of plain numbers."""
    for name, leaf in named.items():
        if not isinstance(leaf, (jax.Array, np.ndarray)) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = leaf.dtype if isinstance(leaf, jax.Array) else type(leaf).__name__
            raise TypeError(
                f"checkpoint state: leaf {name!r}: expected a jax or NumPy array, got {kind}; "
                "keep Python values in `meta` and keys as raw uint32 (jax.random.key_data)"
            )


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves as nested dicts, one level per key of their names."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def with_elements(named: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that a checkpoint holds: arrays without elements are not stored, Orbax refuses them."""
    return {name: leaf for name, leaf in named.items() if math.prod(leaf.shape)}


def stored_leaves(item: epath.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of the arrays in a saved item; reads no array."""
    tree = ocp.PyTreeCheckpointHandler().metadata(item).tree
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in named_leaves(tree).items()
        if hasattr(leaf, "shape")
    }


def _spelled(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def first_difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first leaf in which a checkpoint is not what is wanted, as a sentence; None if there is none."""
    for name, leaf in with_elements(wanted).items():
        if name not in stored:
            return f"leaf {name!r}: expected {_spelled(leaf)}, the checkpoint has no such leaf"
        if (tuple(leaf.shape), leaf.dtype) != (tuple(stored[name].shape), stored[name].dtype):
            return f"leaf {name!r}: expected {_spelled(leaf)}, the checkpoint has {_spelled(stored[name])}"
    for name in stored:
        if name not in wanted:
            return f"leaf {name!r}: the checkpoint has {_spelled(stored[name])}, this run has no such leaf"
    return None


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where a leaf is to be; None for a host array and for one that is not bound to any device."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def read_leaves(item: epath.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads exactly the leaves in `wanted`, each slice straight to the device that needs it.

    An entry with a sharding comes back as jax.Array with that sharding, an np.ndarray as np.ndarray, any
    other as an uncommitted jax.Array on the default device. The caller has checked `first_difference`.
    """

    def restore_args(leaf: Any) -> ocp.RestoreArgs:
        if (sharding := _sharding(leaf)) is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype)

    stored = with_elements(wanted)
    tree = ocp.PyTreeCheckpointHandler().restore(
        item,
        args=ocp.args.PyTreeRestore(
            item=nested({n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in stored.items()}),
            restore_args=nested({n: restore_args(leaf) for n, leaf in stored.items()}),
            partial_restore=True,
        ),
    )
    read = named_leaves(tree)
    result: dict[str, Any] = {}
    for name, leaf in wanted.items():
        value = read[name] if name in read else np.zeros(leaf.shape, leaf.dtype)
        if not isinstance(leaf, np.ndarray) and isinstance(value, np.ndarray):
            sharding = _sharding(leaf)
            value = jnp.array(value) if sharding is None else jax.device_put(value, sharding)
        result[name] = value
    return result
