"""Which collectives a compiled program runs, and how many bytes they make, from its text.

The body of a loop stands in the text once, however often it runs. So the computations are walked from the entry with a
count: a loop multiplies by the number of trips that its text tells, and by those that the caller gives where the bound
is traced.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "c64": 64, "c128": 128}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CHANNEL, _IN_PARTS = re.compile(r"channel_id=(\d+)"), '"async_collective_fusion_config"'
# Of a condition, where the compiler has left that note out, as that of TPUs does: `compare(%i, %last), direction=LT`.
_CONSTANT = re.compile(r"^\s+%?([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_LIMIT = re.compile(r"^\s+ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind: how often they run, and their bytes on each chip, of what goes in or comes out,
    whichever is more."""

    count: int
    bytes: int


def collectives(text: str, unknown_trips: Sequence[int] = ()) -> dict[str, Collective]:
    """The collectives of a compiled module, by kind, loops multiplied out.

    Args:
        text: of `compiled.as_text()`.
        unknown_trips: how often loops run whose count the compiler does not know: the outermost, those within it, and
            so on. Deeper ones count once.
    """
    computations, limits, entry = _computations(text)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    channels: set[str] = set()

    def walk(name: str, times: int, unknown: Sequence[int], inside: tuple[str, ...]) -> None:
        for instruction in computations.get(name, ()):
            if instruction.kind is not None and instruction.channel not in channels:
                counts[instruction.kind][0] += times
                counts[instruction.kind][1] += times * instruction.size
                if instruction.channel is not None:
                    channels.add(instruction.channel)
            for callee, trips in instruction.calls:
                if callee in inside:  # a module has no recursion; a malformed text must not hang
                    continue
                trips = limits.get(trips) if isinstance(trips, str) else trips
                if trips is None:
                    walk(callee, times * (unknown[0] if unknown else 1), unknown[1:], (*inside, callee))
                else:
                    walk(callee, times * trips, unknown, (*inside, callee))

    if entry is not None:
        walk(entry, 1, unknown_trips, (entry,))
    return {kind: Collective(*counts[kind]) for kind in sorted(counts)}


def shape_bytes(shape: str) -> int:
    """Bytes of a result type: `bf16[8,128]{1,0}`. Of a tuple, as asynchronous starts have: its largest element."""
    return max((_array_bytes(kind, dims) for kind, dims in _SHAPE.findall(shape)), default=0)


class _Instruction(NamedTuple):
    kind: str | None  # of collective
    size: int
    channel: str | None  # of one that stands there in parts, each in the product that it overlaps with
    calls: list[tuple[str, int | str]]  # which computations: how often, or the condition that says so


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], dict[str, int], str | None]:
    """By name: the instructions of each computation that matter, and the limits of those that are conditions of loops
    counting from 0, as all of JAX's do; and which is the entry."""
    found: dict[str, list[_Instruction]] = {}
    limits: dict[str, int] = {}
    constants: dict[str, int] = {}
    entry = name = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            found[name], constants = [], {}
            entry = name if head[1] else entry
        elif constant := _CONSTANT.match(line):
            constants[constant[1]] = int(constant[2])
        elif name is not None and (limit := _LIMIT.match(line)) and limit[1] in constants:
            limits[name] = constants[limit[1]]
        elif name is not None and (instruction := _INSTRUCTION.match(line)):
            parsed = _parse(line, instruction[1], instruction[2])
            if parsed.kind is not None or parsed.calls:
                found[name].append(parsed)
    return found, limits, entry


def _parse(line: str, shape: str, operation: str) -> _Instruction:
    if operation.endswith(("-done", "-update")):
        return _Instruction(None, 0, None, [])  # counted at its start
    kind = operation.removesuffix("-start")
    kind = kind if kind in KINDS else None
    called = [(role, name) for role, name in _CALLED.findall(line) if kind is None or role != "to_apply"]  # its sum
    trips: int | str = 1
    if operation == "while":
        known = _TRIPS.search(line)
        trips = int(known[1]) if known else dict(called)["condition"]
    calls = [(name, trips) for _, name in called]
    for group in _BRANCHES.findall(line):
        calls += [(name.strip().lstrip("%"), 1) for name in group.split(",") if name.strip()]
    size = 0 if kind is None else shape_bytes(shape)
    size = size * _group_size(line) if kind == "reduce-scatter" else size
    channel = _CHANNEL.search(line)
    return _Instruction(kind, size, channel[1] if channel and _IN_PARTS in line else None, calls)


def _group_size(line: str) -> int:
    """Chips of one group: `replica_groups=[4,8]<=[32]` has 4 groups of 8, `{{0,1},{2,3}}` two of 2, and
    `mesh['a'=4,'b'=8] {'b'}` 4 of 8."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(axis.split("=") for axis in match[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in match[2].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    match = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(match[1].split(",")) if match else 1


def _array_bytes(kind: str, dims: str) -> int:
    digits = re.search(r"\d+$", kind)
    bits = _BITS.get(kind) or (int(digits[0]) if digits else 0)
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8
