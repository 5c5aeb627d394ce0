"""Reads the text of a program that the TPU's compiler has compiled: its operations, their shapes and places.

In: `Verdict.text`. Out: a `Program`. What an operation does is read in `work.py`, what it costs in `step_time.py`.
"""

import functools
import math
import re
from dataclasses import dataclass, field

from xla_b2t.memory.layout import element_bits
from xla_b2t.memory.program_text import HEAD, NAME, closing

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SOURCE = re.compile(r'source_file="([^"]*)".*?source_line=(\d+)')
_ELSEWHERE = re.compile(r"S\(")  # on the chip, or (5) in the host's memory


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    Attributes:
        name: unique in the program.
        opcode: XLA's name of the operation.
        shape: of the result, with layout and memory space, as printed.
        operands: names.
        cycles: the compiler's estimate of one run; None without.
        source: `file:line` of the Python statement it comes from; "" when unknown.
        text: the whole line.
        is_root: it is what its computation returns.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    cycles: int | None
    source: str
    text: str
    is_root: bool = False


@dataclass
class Program:
    """The computations of a compiled program by name, each its instructions in order."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """Of every result, by the name of its instruction."""
        return {each.name: each.shape for instructions in self.computations.values() for each in instructions}


def parse(text: str) -> Program:
    """Reads a whole module."""
    program, current = Program(), None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = HEAD.match(line)
            current = program.computations.setdefault(head.group(2), []) if head else None
            program.entry = head.group(2) if head and head.group(1) else program.entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found.group(2), found.group(3), bool(found.group(1))))
    return program


@dataclass(frozen=True)
class Array:
    """One array of a printed shape.

    Attributes:
        dimensions: its sizes; of one that only has a bound, the bound.
        bits: of an element.
        order: its axes, the one that changes fastest first.
        tile: sizes that its last axes in memory are padded to, slowest first; () without.
        in_hbm: it is neither on the chip nor in the host's memory.
    """

    dimensions: tuple[int, ...]
    bits: int
    order: tuple[int, ...]
    tile: tuple[int, ...]
    in_hbm: bool

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return -(-math.prod(self.dimensions) * self.bits // 8)

    @property
    def padded_elements(self) -> int:
        """As it lies in memory, in whole tiles."""
        sizes = [self.dimensions[axis] for axis in self.order]
        for place, width in enumerate(reversed(self.tile)):
            if place < len(sizes):
                sizes[place] = -(-sizes[place] // width) * width
        return math.prod(sizes)

    @property
    def padded_bytes(self) -> int:
        """As it lies in memory, in whole tiles."""
        return -(-self.padded_elements * self.bits // 8)


@functools.lru_cache(4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed shape, a tuple's one after the other.

    Raises:
        ValueError: a type of element whose size its name does not say.
    """
    return tuple(_array(*found.groups()) for found in _ARRAY.finditer(shape))


def _array(kind: str, sizes: str, order: str | None, layout: str | None) -> Array:
    dimensions = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    axes = tuple(map(int, order.split(","))) if order else tuple(reversed(range(len(dimensions))))
    tile = re.match(r"T\(([\d,]+)\)", layout or "")
    widths = tuple(map(int, tile.group(1).split(","))) if tile else ()
    return Array(dimensions, element_bits(kind), axes, widths, not _ELSEWHERE.search(layout or ""))


def num_bytes(shape: str) -> int:
    """Bytes of a printed shape wherever it lies, all parts of a tuple together, without padding to tiles."""
    return sum(array.num_bytes for array in arrays(shape))


def hbm_bytes(shape: str) -> int:
    """Bytes of a printed shape that lie in HBM, padded to tiles."""
    return sum(array.padded_bytes for array in arrays(shape) if array.in_hbm)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    opcode = _OPCODE.search(" " + rest) if not rest.startswith("(") else _OPCODE.search(rest, closing(rest, 1) + 1)
    kind, start = opcode.group(1), opcode.end() - (0 if rest.startswith("(") else 1)
    shape = rest[: opcode.start() - (0 if rest.startswith("(") else 1)].strip() if opcode.start() else ""
    operands = tuple(NAME.findall(rest[start : closing(rest, start)]))
    cycles = _CYCLES.search(rest)
    source = _SOURCE.search(rest)
    return Instruction(
        name,
        kind,
        shape,
        operands,
        int(cycles.group(1)) if cycles else None,
        f"{source.group(1)}:{source.group(2)}" if source else "",
        f"%{name} = {rest}",
        is_root,
    )
