"""What one device does in a compiled program: matrix operations, bytes of its memory, collectives.

XLA's own cost analysis counts the body of a loop once; here every loop counts as often as it runs. Of a
conditional the branch with a fused kernel counts, else the dearest: the others are fallbacks. Bytes are the
operands and results of what is not fused; of an array that is sliced or updated in place, the part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from vcppo_jax.aot.hlo import Computation, Instruction, Module, device_groups

KERNELS = ("tpu_custom_call", "fmha")
"""Parts of the custom calls' targets that are fused kernels."""
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id"),
    *("replica-id", "opt-barrier", "copy-done", "async-done", "slice-done", "optimization-barrier"),
}


@dataclasses.dataclass
class Collective:
    """Collectives of one kind in one set of groups, summed."""

    kind: str
    group: tuple[int, ...]
    """Device numbers of one of the groups; they are alike."""
    calls: float = 0.0
    sent: float = 0.0
    """Bytes that one device sends in a ring."""
    payload: float = 0.0
    """Bytes of the whole array that is gathered, reduced or permuted, on one device."""


@dataclasses.dataclass
class Traffic:
    """Sums over a run of the program, of one device."""

    flops: float = 0.0
    """Of matrix products outside of fused kernels; a multiplication and an addition count as two."""
    bytes: float = 0.0
    collectives: dict[tuple[str, tuple[int, ...]], Collective] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0
    """Calls of fused kernels."""

    def add(self, other: Traffic, times: float = 1.0) -> None:
        """Add what `times` runs of something else cost."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        for key, theirs in other.collectives.items():
            ours = self.collectives.setdefault(key, Collective(*key))
            ours.calls += times * theirs.calls
            ours.sent += times * theirs.sent
            ours.payload += times * theirs.payload


def traffic(module: Module, *, devices: int, unknown_trips: float) -> Traffic:
    """The traffic of one run.

    Loops of which only the run knows the number of turns run `unknown_trips` times; ones inside another loop
    once, for the programs here have none.
    """
    counter = _Counter(module, devices, unknown_trips)
    return counter.of(module.entry, False)


class _Counter:
    def __init__(self, module: Module, devices: int, unknown_trips: float) -> None:
        self.module, self.devices, self.unknown_trips = module, devices, unknown_trips
        self.of = functools.cache(self._of)
        self.fused_flops = functools.cache(self._fused_flops)

    def _of(self, name: str, in_loop: bool) -> Traffic:
        total, under_way = Traffic(), set[str]()
        computation = self.module.computations[name]
        for instruction in computation.instructions.values():
            self._count(total, computation, instruction, in_loop, under_way)
        return total

    def _count(
        self, total: Traffic, where: Computation, what: Instruction, in_loop: bool, under_way: set[str]
    ) -> None:
        """Add what an instruction costs; `under_way` are channels of collectives that fusions carry on."""
        opcode = what.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return
        kind = next((k for k in _KINDS if opcode in (k, f"{k}-start")), None)
        called = what.called()
        if opcode == "while":
            trips = self.module.trip_count(where, what)
            unknown = 1.0 if in_loop else self.unknown_trips
            times = unknown if trips is None else trips
            total.add(self.of(called["body"], True), times)
            total.add(self.of(called["condition"], True), times)
        elif opcode == "conditional":
            branches = [self.of(branch, in_loop) for branch in what.branches()]
            total.add(max(branches, key=lambda t: (t.kernels, t.flops, t.bytes)))
        elif opcode in ("call", "async-start"):
            for inner in called.values():
                total.add(self.of(inner, in_loop))
        elif kind is not None:
            self._collective(total, where, what, kind)
        elif opcode == "fusion":
            self._fusion(total, where, what, called["calls"], under_way)
        else:
            if opcode == "custom-call" and any(part in what.attributes for part in KERNELS):
                total.kernels += 1
            total.flops += matrix_flops(where, what)
            total.bytes += _plain_bytes(where, what)

    def _fusion(
        self, total: Traffic, where: Computation, what: Instruction, called: str, under_way: set[str]
    ) -> None:
        inner = self.module.computations[called]
        total.flops += self.fused_flops(called)
        for place, operand in enumerate(what.operands):
            total.bytes += min(where.bytes_of(operand), self._read(inner, place, where, operand))
        carried_on = set()
        for instruction in inner.instructions.values():
            if instruction.opcode in _KINDS:
                # TPU: fusions of products take turns to carry a collective on, under one channel.
                channel = re.search(r"channel_id=\d+", instruction.attributes)
                if channel is not None and channel[0] in under_way:
                    carried_on.add(instruction.name)
                    continue
                under_way |= {channel[0]} if channel is not None else set()
                # TPU: an all-reduce whose result is sliced at once is a reduce-scatter.
                kind = "reduce-scatter" if "scatter" in called else instruction.opcode
                self._collective(total, inner, instruction, kind, memory=False)
        total.bytes += self._written(inner, what, carried_on)

    def _fused_flops(self, name: str) -> float:
        inner = self.module.computations[name]
        flops = 0.0
        for instruction in inner.instructions.values():
            if instruction.opcode == "fusion":
                flops += self.fused_flops(instruction.called()["calls"])
            flops += matrix_flops(inner, instruction)
        return flops

    def _read(self, inner: Computation, place: int, where: Computation, operand: str) -> float:
        """Bytes that a fusion reads of an operand: of one that is only sliced or updated, those parts."""
        whole = where.bytes_of(operand)
        name = inner.parameters.get(place)
        if name is None or whole == 0:
            return whole
        read = 0.0
        for user, at in inner.users.get(name, []):
            if user.opcode in ("dynamic-slice", "gather") and at == 0:
                read += _size(inner, user.name)
            elif user.opcode in ("dynamic-update-slice", "scatter") and at == 0:
                continue
            elif user is inner.root and user.opcode == "tuple":
                continue  # handed on as it is
            elif user.opcode == "fusion":
                deeper = self.module.computations[user.called()["calls"]]
                read += self._read(deeper, at, where, operand)
            else:
                return whole
        return read

    def _written(self, inner: Computation, what: Instruction, already: set[str]) -> float:
        """Bytes that a fusion writes, without the results that are `already` there when it starts."""
        root = inner.root
        roots = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        written = 0.0
        for array, result in zip(what.result, roots):
            if array.on_chip:
                continue
            while result.opcode in ("bitcast", "copy") and result.operands:
                result = inner.instructions[result.operands[0]]
            if result.opcode == "parameter" or result.name in already:
                continue
            if result.opcode == "fusion":
                written += self._written(self.module.computations[result.called()["calls"]], result, already)
            elif result.opcode == "dynamic-update-slice":
                written += _size(inner, result.operands[1])
            elif result.opcode == "scatter":
                written += _size(inner, result.operands[-1])
            else:
                written += array.size
        return written

    def _collective(
        self, total: Traffic, where: Computation, what: Instruction, kind: str, *, memory: bool = True
    ) -> None:
        groups = device_groups(what.attributes, self.devices)
        if kind == "collective-permute":
            moved = [tuple(pair) for pair in groups if pair[0] != pair[1]]
            if not moved:
                return
            group, parts = moved[0], 2
        else:
            group, parts = tuple(groups[0]), len(groups[0])
        inputs = sum(_size(where, name) for name in what.operands)
        # The result of a -start holds the inputs too.
        whole = inputs * parts if kind == "all-gather" else inputs
        share = (parts - 1) / parts
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)
        entry = total.collectives.setdefault((kind, group), Collective(kind, group))
        entry.calls += 1
        entry.sent += factor * whole
        entry.payload += whole
        if memory:
            total.bytes += inputs + (whole if kind != "reduce-scatter" else whole / parts)


def _size(where: Computation, name: str) -> int:
    return sum(array.size for array in where.instructions[name].result)


def _plain_bytes(where: Computation, what: Instruction) -> float:
    """Bytes of an instruction that is not fused."""
    result = sum(array.size for array in what.result if not array.on_chip)
    if what.opcode in ("dynamic-slice", "slice", "gather"):
        return result + min(sum(array.size for array in what.result), where.bytes_of(what.operands[0]))
    if what.opcode in ("copy-start", "slice-start"):
        # The result of the one holds the copy first, that of the other the array that is sliced.
        copy = what.result[0 if what.opcode == "copy-start" else 1]
        return (0 if copy.on_chip else copy.size) + min(copy.size, where.bytes_of(what.operands[0]))
    if what.opcode == "dynamic-update-slice":
        return 2 * where.bytes_of(what.operands[1])
    if what.opcode == "scatter":
        return 3 * where.bytes_of(what.operands[-1])
    if what.opcode == "custom-call" and "AllocateBuffer" in what.attributes:
        return 0
    if what.opcode in ("broadcast", "iota"):
        return result
    return result + sum(where.bytes_of(name) for name in set(what.operands))


def matrix_flops(where: Computation, what: Instruction) -> float:
    """Operations of a dot, a convolution (as TPUs compute products) or a library's matrix product; else 0."""
    if what.opcode == "dot":
        left = where.instructions[what.operands[0]].result[0].dims
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", what.attributes)
        contracted = math.prod(left[int(n)] for n in axes[1].split(",") if n) if axes else 1
        return 2.0 * math.prod(what.result[0].dims) * contracted
    if what.opcode == "convolution":
        return _convolution_flops(where, what)
    if what.opcode == "custom-call" and "gemm" in what.attributes:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', what.attributes)
        left = where.instructions[what.operands[0]].result[0].dims
        numbers = re.findall(r"\d+", axes[1]) if axes else []
        return 2.0 * math.prod(what.result[0].dims) * math.prod(left[int(n)] for n in numbers)
    return 0.0


def _convolution_flops(where: Computation, what: Instruction) -> float:
    """2 x batch x output features x input features x pairs of places in the window that are not padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", what.attributes)
    assert labels is not None
    left, right = (where.instructions[name].result[0].dims for name in what.operands[:2])
    out = what.result[0].dims
    size = dict(zip(labels[3], out))
    kernel, image = dict(zip(labels[2], right)), dict(zip(labels[1], left))
    flops = 2.0 * size["b"] * size["f"] * kernel["i"]
    window = re.search(r"window=\{([^}]*)\}", what.attributes)
    spatial = sorted(label for label in labels[3] if label.isdigit())

    def per_dim(key: str, default: str) -> list[str]:
        found = re.search(rf"\b{key}=([\d_x\-]+)", window[1]) if window else None
        return found[1].split("x") if found else [default] * len(spatial)

    strides, paddings = per_dim("stride", "1"), per_dim("pad", "0_0")
    base, dilation = per_dim("lhs_dilate", "1"), per_dim("rhs_dilate", "1")
    for i, label in enumerate(spatial):
        low = int(paddings[i].split("_")[0])
        flops *= _valid_pairs(
            size[label], kernel[label], image[label], int(strides[i]), low, int(base[i]), int(dilation[i])
        )
    groups = re.search(r"batch_group_count=(\d+)", what.attributes)
    return flops / int(groups[1]) if groups else flops


@functools.lru_cache(maxsize=4096)
def _valid_pairs(out: int, kernel: int, image: int, stride: int, low: int, base: int, dilation: int) -> int:
    """Pairs of an output's and a kernel's place that meet a place of the image."""
    if kernel == 1 and low == 0 and stride == 1 and base == 1:
        return min(out, image)
    dilated = (image - 1) * base + 1
    outputs = np.arange(out) * stride - low
    count = 0
    for k in range(kernel):
        at = outputs + k * dilation
        count += int(np.count_nonzero((at >= 0) & (at < dilated) & (at % base == 0)))
    return count
