"""Reads the text of a compiled HLO module: computations, instructions, shapes, loops, groups of devices.

Only what counting costs needs. The grammar is that of `compiled.as_text()`, jaxlib 0.10 to 0.12.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s4": 1, "u4": 1},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16},
}
_ARRAY = re.compile(r"([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(calls|to_apply|body|condition|async_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool
    """Whether it lies in a TPU core's own memory, of which reading and writing costs no bandwidth."""

    @property
    def size(self) -> int:
        """Bytes, without padding."""
        return math.prod(self.dims) * _BYTES.get(self.dtype, 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = result opcode(operands), attributes`."""

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    argument: str
    """What stands in the parentheses, as it is."""
    root: bool

    def called(self) -> dict[str, str]:
        """Computations that it calls, by the attribute that names them."""
        return dict(_CALLED.findall(self.attributes))

    def branches(self) -> list[str]:
        """Of a conditional."""
        match = _BRANCHES.search(self.attributes)
        if match:
            return _NAME.findall(match[1]) or [name.strip() for name in match[1].split(",")]
        return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.attributes)


@dataclasses.dataclass
class Computation:
    """Instructions in their order, by name."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Number -> name."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.argument): i.name for i in found}

    @functools.cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next(i for i in self.instructions.values() if i.root)

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Name -> who reads it, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for place, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, place))
        return users

    def bytes_of(self, name: str) -> int:
        """Bytes off the chip of an instruction's result."""
        return sum(array.size for array in self.instructions[name].result if not array.on_chip)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program of one device."""

    computations: dict[str, Computation]
    entry: str

    def trip_count(self, where: Computation, loop: Instruction) -> int | None:
        """How often a while loop in a computation runs; None where only the run knows.

        XLA says it, or its condition compares a counter with a constant, which may be carried along.
        """
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known[1])
        called = loop.called()
        compared = self._compared(self.computations[called["condition"]])
        if compared is None:
            return None
        counter, limit, limit_at = compared
        carried = where.instructions[loop.operands[0]]
        if carried.opcode == "tuple":
            start = _constant(where, carried.operands[counter]) or 0
            if limit is None and limit_at is not None:
                limit = _constant(where, carried.operands[limit_at])
        else:
            start = 0
        if limit is None:
            return None
        return max(0, -(-(limit - start) // _step(self.computations[called["body"]], counter)))

    def _compared(self, condition: Computation) -> tuple[int, int | None, int | None] | None:
        """(place of the counter in what is carried, its limit, or the limit's place) of a condition."""
        root, inner = condition.root, condition
        outer: dict[str, str] = {}
        if root.opcode == "fusion":
            inner = self.computations[root.called()["calls"]]
            outer = {inner.parameters[i]: name for i, name in enumerate(root.operands)}
            root = inner.root
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None

        def source(name: str) -> tuple[Computation, Instruction]:
            return (
                (condition, condition.instructions[outer[name]])
                if name in outer
                else (inner, inner.instructions[name])
            )

        counter = _place(source(root.operands[0])[1])
        place, limit = source(root.operands[1])
        return None if counter is None else (counter, _constant(place, limit.name), _place(limit))


def _place(instruction: Instruction) -> int | None:
    """Which part of a tuple it takes."""
    match = re.search(r"index=(\d+)", instruction.attributes)
    return int(match[1]) if instruction.opcode == "get-tuple-element" and match else None


def _constant(where: Computation, name: str) -> int | None:
    """The whole number that an instruction is, through copies."""
    instruction = where.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = where.instructions[instruction.operands[0]]
    number = instruction.argument.strip()
    return int(number) if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", number) else None


def _step(body: Computation, counter: int) -> int:
    """By how much a turn of the body moves the counter; 1 where that is not to be seen."""
    if body.root.opcode != "tuple":
        return 1
    added = body.instructions[body.root.operands[counter]]
    if added.opcode == "add":
        for operand in added.operands:
            number = _constant(body, operand)
            if number is not None and number > 0:
                return number
    return 1


def parse_shape(text: str) -> tuple[Array, ...]:
    """The arrays of a result's type."""
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(text):
        sizes = tuple(int(n) for n in dims.split(",")) if dims else ()
        arrays.append(Array(dtype, sizes, bool(re.search(r"S\([1-9]", layout))))
    return tuple(arrays)


def _balanced(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    raise ValueError(f"HLO: a parenthesis does not close: {text[:200]}")


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    start = match.end()
    end = _balanced(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    closing = _balanced(line, opening)
    argument = line[opening + 1 : closing]
    operands = tuple(_NAME.findall(argument))
    return Instruction(
        match[2],
        line[end + 1 : opening].strip(),
        parse_shape(line[start:end]),
        operands,
        line[closing + 1 :],
        argument,
        bool(match[1]),
    )


def parse_module(text: str) -> Module:
    """The module of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = Computation(header[2])
            entry = header[2] if header[1] else entry
            continue
        match = _LINE.match(line)
        if match and current is not None:
            instruction = _instruction(line, match)
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("HLO: the text of the compiled program has no ENTRY computation")
    return Module(computations, entry)


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of device numbers of a collective; all devices where it names none.

    Three spellings: {{0,1},{2,3}}, [2,4]<=[4,2]T(1,0), and mesh['a'=2,'b'=4] {'b'}.
    """
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
    if pairs:
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])]
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes)
    if listed:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota:
        return _iota(iota[1]).tolist()
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", attributes)
    if mesh:
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    return [list(range(devices))]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(text: str) -> np.ndarray:
    """[groups, size] of `[2,4]<=[4,2]T(1,0)`."""
    match = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    assert match is not None
    shape = _numbers(match[1])
    source = _numbers(match[2]) if match[2] else shape
    numbers = np.arange(math.prod(source)).reshape(source)
    return numbers.transpose(_numbers(match[3]) if match[3] else None or range(len(source))).reshape(shape)


def _mesh_groups(axes: str, ids: str | None, over: str) -> list[list[int]]:
    """Groups along the axes `over` of a named mesh; an axis may be a part of one, `'a':(2)4`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    count = math.prod(sizes.values())
    numbers = np.arange(count)
    if ids:
        match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
        if match:
            source = np.arange(count).reshape(_numbers(match[1]))
            numbers = source.transpose(_numbers(match[2])) if match[2] else source
        else:
            numbers = np.asarray(_numbers(re.sub(r"[\[\]\s]", "", ids)))
    shape: list[int] = []
    chosen: list[int] = []
    parts = {
        name: (before, size) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    }
    for name, size in sizes.items():
        if name not in parts:
            shape.append(size)
        elif parts[name][0]:
            before, inner = int(parts[name][0]), int(parts[name][1])
            shape += [before, inner, size // before // inner]
            chosen.append(len(shape) - 2)
        else:
            shape.append(size)
            chosen.append(len(shape) - 1)
    split = numbers.reshape(shape)
    moved = np.moveaxis(split, chosen, range(-len(chosen), 0))
    return moved.reshape(-1, math.prod(shape[i] for i in chosen)).tolist()
