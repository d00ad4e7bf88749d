"""Memory of one layer's attention, forward and backward, as compiled for a TPU v5p, an H100 and this CPU.

    python benchmarks/attention_memory.py [--length 16384] [--platform v5p] ...

Nothing is run and no accelerator is needed: XLA compiles for a described device. Prints one line per
program: temporary memory (arguments and results not counted), and the time to compile. The default sizes
are those of Qwen2.5-7B, one row, bfloat16. A platform whose compiler is not installed is left out with
the package to install.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vcppo_jax.aot.topology import TopologyError, topology
from vcppo_jax.models.attention import attention
from vcppo_jax.sharding import make_mesh, named_sharding

# Platform -> its topology, packages that compile for it, and the (name, options, packed) to compile.
EVERYWHERE = [
    ("blocked", {"implementation": "blocked"}, True),
    ("plain", {"implementation": "blocked"}, True),
]
PLATFORMS: dict[str, tuple[str, tuple[str, ...], list[tuple[str, dict[str, Any], bool]]]] = {
    "v5p": ("v5p:2x2x1", ("libtpu",), [("splash", {"implementation": "splash"}, True), *EVERYWHERE]),
    "h100": (
        "h100:1x8",
        ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
        [
            ("cudnn", {"implementation": "cudnn"}, True),
            ("cudnn, one sequence", {"implementation": "cudnn"}, False),
            *EVERYWHERE,
        ],
    ),
    "cpu": ("cpu:1", ("jaxlib",), EVERYWHERE),
}


def compile_attention(mesh: Mesh, sizes: argparse.Namespace, options: dict[str, Any], packed: bool) -> Any:
    """The compiled gradients of one attention, its queries, keys and values given."""

    def array(heads: int, axis: str) -> jax.ShapeDtypeStruct:
        shape = (sizes.batch, sizes.length, heads, sizes.head_dim)
        sharding = named_sharding(mesh, ("batch", "length", axis, "head_dim"), shape)
        return jax.ShapeDtypeStruct(shape, sizes.dtype, sharding=sharding)

    query, key = array(sizes.heads, "act_heads"), array(sizes.kv_heads, "act_kv_heads")
    ids_sharding = named_sharding(mesh, ("batch", "length"), (sizes.batch, sizes.length))
    ids = jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32, sharding=ids_sharding)

    def total(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
        return jnp.sum(jnp.square(attention(query, key, value, ids, **options).astype(jnp.float32)))

    with jax.set_mesh(mesh):
        return (
            jax.jit(jax.value_and_grad(total, (0, 1, 2)))
            .lower(query, key, key, ids if packed else None)
            .compile()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", action="append", choices=PLATFORMS, help="repeatable; all by default")
    parser.add_argument("--implementation", action="append", help="a name in the table; repeatable")
    for name, default in (("batch", 1), ("length", 16384), ("heads", 28), ("kv_heads", 4), ("head_dim", 128)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequence", type=int, default=1, help="devices that share a row; memory is of each")
    sizes = parser.parse_args()

    print(
        f"jax {jax.__version__}; rows {sizes.batch}, length {sizes.length}, heads {sizes.heads}, kv heads "
        f"{sizes.kv_heads}, head width {sizes.head_dim}, {sizes.dtype}, on {sizes.sequence} devices each\n"
    )
    print("| compiled for | implementation | temporary MiB | seconds to compile |")
    print("|---|---|---|---|")
    notes = []
    for name in sizes.platform or PLATFORMS:
        described, packages, programs = PLATFORMS[name]
        try:
            devices = topology(described).devices
        except TopologyError as error:
            notes.append(f"{name} is left out: {error}")
            continue
        notes.append(f"{name}: {', '.join(f'{p} {importlib.metadata.version(p)}' for p in packages)}")
        mesh = make_mesh({"sequence": sizes.sequence}, devices[: sizes.sequence])
        for label, options, packed in programs:
            if label not in (sizes.implementation or [label]):
                continue
            # The plain form is the blocked one with a single block.
            options = {**options, "block": sizes.length} if label == "plain" else options
            start = time.perf_counter()
            compiled = compile_attention(mesh, sizes, options, packed)
            seconds = time.perf_counter() - start
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            print(f"| {name} | {label} | {temporary:,.0f} | {seconds:.1f} |", flush=True)
    print("\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
