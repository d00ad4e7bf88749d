"""Compiles one traced program for a topology and says what it takes: memory, operations, bytes, time."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from vcppo_jax.aot.hlo import parse_module
from vcppo_jax.aot.jaxpr_flops import jaxpr_flops
from vcppo_jax.aot.topology import Topology
from vcppo_jax.aot.traffic import Collective, traffic

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over one set of groups, in one run of the program."""

    kind: str
    devices: int
    """In a group."""
    over: str
    """The links that it goes over."""
    calls: float
    payload_bytes: float
    """Of the arrays gathered, reduced or moved, on one device."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """One run of a compiled program. Bytes, operations and seconds are those of one chip."""

    argument_bytes: float
    temporary_bytes: float
    output_bytes: float
    """Not counting what is written over donated arguments."""
    flops: float
    total_flops: float
    """Of all chips, but what several compute alike counts once."""
    memory_bytes: float
    transfers: tuple[Transfer, ...]
    compute_seconds: float
    memory_seconds: float
    interconnect_seconds: float
    compile_seconds: float

    @property
    def peak_bytes(self) -> float:
        """Arguments, results and temporaries together."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def seconds(self) -> float:
        """At least so long: the roofline, with the three overlapped perfectly."""
        return max(self.compute_seconds, self.memory_seconds, self.interconnect_seconds)

    @property
    def bound(self) -> str:
        """What sets the time."""
        times = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "interconnect": self.interconnect_seconds,
        }
        return max(times, key=lambda name: times[name])


class DoesNotFit(Exception):
    """The compiler found no plan within the chip's memory; `bytes` is what it would take, None if unsaid."""

    def __init__(self, message: str, needed: float | None) -> None:
        super().__init__(message)
        self.bytes = needed


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program's cost, and shapes and shardings of its results, which the next program takes."""

    cost: Cost
    results: Any


def compile_program(
    traced: jax.stages.Traced, topology: Topology, mesh: Mesh, *, unknown_trips: float = 1.0
) -> Compiled:
    """The program compiled for the topology's devices, on which `mesh` lies.

    `unknown_trips`: how often a loop runs whose number of turns only the run knows (micro-batches, decode
    steps). Raises DoesNotFit.
    """
    start = time.perf_counter()
    try:
        compiled, text = _compile(traced, topology)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
            raise
        raise _does_not_fit(message) from None
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    module = parse_module(text)
    work = traffic(module, devices=mesh.size, unknown_trips=unknown_trips)
    whole = jaxpr_flops(traced.jaxpr, unknown_trips=unknown_trips)
    flops = work.flops + whole.kernels / mesh.size
    transfers = tuple(
        sorted((_transfer(c, topology, mesh) for c in work.collectives.values()), key=lambda t: -t.seconds)
    )
    chip = topology.chip
    cost = Cost(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=flops,
        total_flops=whole.total,
        memory_bytes=work.bytes,
        transfers=_merged(transfers),
        compute_seconds=flops / (chip.tflops * 1e12),
        memory_seconds=work.bytes / (chip.memory_gbps * 1e9),
        interconnect_seconds=sum(t.seconds for t in transfers),
        compile_seconds=seconds,
    )
    return Compiled(cost, compiled.out_info)


def _compile(traced: jax.stages.Traced, topology: Topology) -> tuple[Any, str]:
    """(the program, its text). TPU's is what the compiler dumps: `as_text` fails on sparse cores' gathers."""
    if not topology.chip.wraps:
        compiled = traced.lower().compile()
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        compiled = traced.lower().compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (dump,) = Path(folder).glob("*.after_optimizations.txt")
        return compiled, dump.read_text(encoding="utf-8")


def _does_not_fit(message: str) -> DoesNotFit:
    """From libtpu's `Used 20.10G of 15.75G hbm`."""
    match = re.search(r"Used ([\d.]+)([KMG]) of ([\d.]+)[KMG] hbm", message)
    needed = float(match[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else None
    return DoesNotFit(message.splitlines()[0], needed)


def _transfer(collective: Collective, topology: Topology, mesh: Mesh) -> Transfer:
    number = {id(device): index for index, device in enumerate(topology.devices)}
    devices = mesh.devices.reshape(-1)
    places = [topology.place(number[id(devices[i])]) for i in collective.group]
    over, gbps = links(topology, places, ring=collective.kind != "collective-permute")
    return Transfer(
        collective.kind,
        len(places),
        over,
        collective.calls,
        collective.payload,
        collective.sent / (gbps * 1e9),
    )


def links(topology: Topology, places: list[tuple[int, ...]], *, ring: bool) -> tuple[str, float]:
    """(what connects the devices at these places, 10^9 bytes a second that one of them sends over it).

    On a torus each dimension along which the places differ gives the two links of a ring, one where the
    dimension is not closed or the group does not span it. GPUs of one host have NVLink; between hosts,
    each GPU of a group brings its network card.
    """
    chip = topology.chip
    spans = [sorted({place[d] for place in places}) for d in range(len(topology.shape))]
    if chip.wraps:
        used = [d for d, span in enumerate(spans) if len(span) > 1]
        if not ring:
            return "ici", chip.link_gbps
        rings = [size % chip.wraps == 0 for size in topology.shape]
        if len(rings) == 3:
            rings = [all(rings)] * 3
        gbps = 0.0
        for d in used:
            closed = rings[d] and len(spans[d]) == topology.shape[d]
            gbps += chip.link_gbps * (2 if closed else 1)
        return f"ici, {len(used)} dim.", gbps
    if len(spans[0]) == 1:
        return "nvlink", chip.link_gbps
    return "network", min(chip.link_gbps, chip.network_gbps * (len(spans[1]) if ring else 1))


def _merged(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """One entry for each kind, size of group and kind of links."""
    merged: dict[tuple[str, int, str], Transfer] = {}
    for t in transfers:
        key = (t.kind, t.devices, t.over)
        old = merged.get(key)
        if old is not None:
            t = dataclasses.replace(
                t,
                calls=t.calls + old.calls,
                payload_bytes=t.payload_bytes + old.payload_bytes,
                seconds=t.seconds + old.seconds,
            )
        merged[key] = t
    return tuple(merged.values())


def bytes_per_chip(tree: Any) -> int:
    """Bytes of one chip's shards of a tree of shapes with shardings."""

    def shard(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        size = x.dtype.itemsize
        for n in shape:
            size *= n
        return size

    return sum(map(shard, jax.tree.leaves(tree)))
