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
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu looks for a TPU host's metadata otherwise, and waits for it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental import topologies
from jax.sharding import Mesh

from vcppo_jax.models.attention import attention
from vcppo_jax.sharding import make_mesh, named_sharding

# What XLA has to know of an H100 SXM with 80 GB: NVIDIA's published figures of the GH100 with 132 SMs.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800  memory_bandwidth: 3352320000000  device_memory_size: 84942979072
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def v5p_devices() -> list[Any]:
    return topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices


def h100_devices() -> list[Any]:
    # JAX asks the attached GPU what it can do, and there is none: say what an H100 answers.
    fused.check_cudnn_version = lambda: 91000
    fused.check_compute_capability = lambda capability: float(capability) <= 9.0
    description = {"topology_name": "h100", "topology": "1x8x1", "target_config": H100}
    return topologies.get_topology_desc(platform="cuda", **description).devices


# Platform -> packages that compile for it, its devices, and the (name, options, packed) to compile.
EVERYWHERE = [
    ("blocked", {"implementation": "blocked"}, True),
    ("plain", {"implementation": "blocked"}, True),
]
PLATFORMS: dict[
    str, tuple[tuple[str, ...], Callable[[], list[Any]], list[tuple[str, dict[str, Any], bool]]]
] = {
    "v5p": (("libtpu",), v5p_devices, [("splash", {"implementation": "splash"}, True), *EVERYWHERE]),
    "h100": (
        ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
        h100_devices,
        [
            ("cudnn", {"implementation": "cudnn"}, True),
            ("cudnn, one sequence", {"implementation": "cudnn"}, False),
            *EVERYWHERE,
        ],
    ),
    "cpu": (("jaxlib",), jax.devices, EVERYWHERE),
}


def installed(packages: tuple[str, ...]) -> str | None:
    """The versions of the packages, or None where one is missing."""
    try:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return None


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

    print(f"jax {jax.__version__}; rows {sizes.batch}, length {sizes.length}, heads {sizes.heads}, kv heads "
          f"{sizes.kv_heads}, head width {sizes.head_dim}, {sizes.dtype}, "
          f"{sizes.sequence} devices\n")  # fmt: skip
    print("| compiled for | implementation | temporary MiB | seconds to compile |")
    print("|---|---|---|---|")
    notes = []
    for name in sizes.platform or PLATFORMS:
        packages, devices, programs = PLATFORMS[name]
        versions = installed(packages)
        if versions is None:
            notes.append(f"{name} is left out; to compile for it: pip install {' '.join(packages)}")
            continue
        notes.append(f"{name}: {versions}")
        mesh = make_mesh({"sequence": sizes.sequence}, devices()[: sizes.sequence])
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
