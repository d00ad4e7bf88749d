"""Devices that are described, not attached: what XLA compiles for on a machine without them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from vcppo_jax.aot.chips import Chip, chip_of


class TopologyError(ValueError):
    """A topology that cannot be described here; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, and how they are connected."""

    name: str
    devices: tuple[Any, ...]
    chip: Chip
    shape: tuple[int, ...]
    """TPU: the torus; GPU: (hosts, GPUs of a host)."""

    def place(self, index: int) -> tuple[int, ...]:
        """Coordinates of a device by its number in `devices`: on the torus, or (host, GPU)."""
        if self.chip.wraps:
            return tuple(self.devices[index].coords)[: len(self.shape)]
        return index // self.shape[1], index % self.shape[1]


# What XLA has to know of Hopper SXM modules: NVIDIA's published figures of the GH100 with 132 SMs.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800  memory_bandwidth: {bandwidth}  device_memory_size: {memory}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_GPUS = {
    "h100": _HOPPER.format(name="NVIDIA H100 80GB HBM3", bandwidth=3_352_320_000_000, memory=84_942_979_072),
    "h200": _HOPPER.format(name="NVIDIA H200", bandwidth=4_814_000_000_000, memory=150_110_011_392),
}
_TPUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
"""Number of dimensions of the torus."""
# The CPU stands in for a chip in tests and for trying things out: nobody should read its figures.
_CPU = Chip("cpu", 1.0, 1024.0, 10.0, 1.0, 1.0, 0)


def _tpu(kind: str, sizes: Sequence[int]) -> list[Any]:
    _require("libtpu", "plan-tpu")
    # libtpu looks for a TPU host's metadata otherwise, and waits for it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # And it locks the host's TPU, which describing one does not take.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    name = f"{kind}:{'x'.join(map(str, sizes))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise TopologyError(f"topology {name}: libtpu cannot describe it: {reason}") from None


def _gpu(kind: str, sizes: Sequence[int]) -> list[Any]:
    _require("jax_plugins.xla_cuda12", "plan-gpu")
    # JAX asks the attached GPU what its cuDNN can do, and there is none: say what a Hopper GPU answers.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    fused.check_cudnn_version = lambda: 91000
    fused.check_compute_capability = lambda capability: float(capability) <= 9.0
    hosts, gpus = sizes
    described: dict[str, Any] = {"topology_name": kind, "topology": f"{hosts}x{gpus}x1"}
    return topologies.get_topology_desc(platform="cuda", target_config=_GPUS[kind], **described).devices


def _cpu(kind: str, sizes: Sequence[int]) -> list[Any]:
    (count,) = sizes
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise TopologyError(
            f"topology cpu:{count}: this process has {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _require(module: str, extra: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise TopologyError(
            f"compiling for this topology needs the package {module.split('.')[-1]}, which is not installed: "
            f"pip install 'vcppo_jax[{extra}]'"
        )


KINDS: dict[str, tuple[int, Callable[[str, Sequence[int]], list[Any]]]] = {
    **{kind: (dimensions, _tpu) for kind, dimensions in _TPUS.items()},
    **{kind: (2, _gpu) for kind in _GPUS},
    "cpu": (1, _cpu),
}
"""Kind -> number of sizes, and what describes it."""


def topology(name: str) -> Topology:
    """The topology of a name: `v5p:4x4x4`, `v5e:4x4`, `h100:HOSTSxGPUS`, `cpu:8`.

    TPU sizes count chips (Google's v5p-128 is 64 chips, for it counts TensorCores; v5e-64 is 64). Raises
    TopologyError for another name, and with the extra to install where the compiler is missing.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)
    kind, sizes = (match[1], [int(n) for n in match[2].split("x")]) if match else ("", [])
    if kind not in KINDS or len(sizes) != KINDS[kind][0] or min(sizes) < 1:
        raise TopologyError(
            f"topology: expected one like v5p:4x4x4, v5e:8x8, v6e:8x8, h100:4x8 (hosts x GPUs), h200:1x8 or "
            f"cpu:8, got {name!r}"
        )
    devices = KINDS[kind][1](kind, sizes)
    if len(devices) != math.prod(sizes):
        raise TopologyError(
            f"topology {name}: {' x '.join(map(str, sizes))} = {math.prod(sizes)}, but it was described with "
            f"{len(devices)} devices"
        )
    chip = _CPU if kind == "cpu" else chip_of(devices[0].device_kind)
    assert chip is not None  # every kind has its chip
    return Topology(name, tuple(devices), chip, (1, *sizes) if kind == "cpu" else tuple(sizes))
