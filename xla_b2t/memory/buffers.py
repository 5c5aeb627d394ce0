"""Where the values of a compiled program lie in memory, and when they are needed: the compiler's buffer assignment.

In: `Verdict.buffers`. Out: allocations with the values in them. A parameter has an allocation of its own for the whole
program (a donated one holds its output in the end, and others' values before); temporaries share one large
allocation, in which each has its place for as long as it is needed. Bytes are padded to the tiles of a value's layout.

Source: BufferAssignment::ToVerboseString and HloLiveRange::ToString in openxla/xla, xla/service/.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

HBM, VMEM = 0, 1
"""The compiler's numbers of memory spaces; `S(1)` in a layout is VMEM."""

Kind = Literal["parameter", "output", "constant", "temporary"]

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?, (.*)")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+?)(\{[\d, ]*\}):(\d+)-(\d+)")
_PARAMETER = re.compile(r"parameter (\d+)")


@dataclass(frozen=True)
class Value:
    """A value in its place.

    Attributes:
        instruction: the operation that makes it, or the loop that carries it.
        index: which part of the operation's result, such as `{1}`; `{}` for the whole.
        bytes, offset: its place in the allocation.
        shape: with layout, as printed.
        first, last: numbers of the first and the last instruction that it must be there for; those of a loop's body are
            counted where the loop stands.
    """

    instruction: str
    index: str
    bytes: int
    offset: int
    shape: str
    first: int
    last: int


@dataclass(frozen=True)
class Block:
    """An allocation.

    Attributes:
        kind: what it is there for; "output" is one that takes no parameter's place.
        parameter: its number; -1 for another kind.
        space: the memory it lies in.
        bytes: its size, gaps included.
        values: what lies in it at one time or another.
    """

    kind: Kind
    parameter: int
    space: int
    bytes: int
    values: list[Value] = field(default_factory=list)


def parse(text: str) -> list[Block]:
    """Reads `Verdict.buffers`."""
    lines = text.splitlines()
    ranges = {(found[1], found[2]): (int(found[3]), int(found[4])) for found in map(_RANGE.fullmatch, lines) if found}
    blocks: list[Block] = []
    for line in lines:
        if found := _ALLOCATION.match(line):
            blocks.append(_block(int(found[1]), int(found[2] or HBM), found[3]))
        elif found := _VALUE.match(line):
            name, index = found[1], found[2] or "{}"
            first, last = ranges.get((name, index), (0, -1))
            blocks[-1].values.append(Value(name, index, int(found[3]), int(found[4]), found[5], first, last))
    return blocks


def _block(size: int, space: int, words: str) -> Block:
    parameter = _PARAMETER.search(words)
    if parameter:
        return Block("parameter", int(parameter[1]), space, size)
    kinds: dict[str, Kind] = {"constant": "constant", "preallocated-temp": "temporary"}
    return Block(next((kind for word, kind in kinds.items() if word in words), "output"), -1, space, size)


def fullest(blocks: Iterable[Block]) -> tuple[int, int]:
    """The instruction at which the most bytes of these allocations are needed, and how many are."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for number, block in enumerate(blocks):
        for value in block.values:
            for time in range(value.first, value.last + 1):
                places.setdefault(time, []).append((number, value.offset, value.offset + value.bytes))
    needed = {time: _covered(taken) for time, taken in places.items()}
    return max(needed.items(), key=lambda item: item[1], default=(0, 0))


def _covered(places: list[tuple[int, int, int]]) -> int:
    """Bytes that lie in any of the places; what is changed in place is one place under two names."""
    total, block, end = 0, -1, 0
    for number, first, last in sorted(places):
        if number != block:
            block, end = number, 0
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total
