"""What a compiled program holds in HBM when it holds most: by kind, and the largest allocations with their lines.

In: a `Verdict` of the TPU's compiler, and what the program's parameters are (`TracedRun.parameters`). Out: a `Usage`.
The compiler says where every value lies and when (`buffers.py`), so nothing is estimated here; its refused programs are
read the same way.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_b2t.memory.buffers import HBM, VMEM, Block, Value, fullest, parse
from xla_b2t.memory.compiled_program import Instruction, Program, num_bytes
from xla_b2t.memory.compiled_program import parse as parse_program
from xla_b2t.memory.trips import called
from xla_b2t.xla.frames import shown

if TYPE_CHECKING:
    from xla_b2t.training.traced import Parameter
    from xla_b2t.xla.verdict import Verdict

_OPTIMIZER = ("master", "moment1", "moment2", "sum")
_ROLES = {
    "weight": "weight",
    "master": "float32 master of",
    "moment1": "first moment of",
    "moment2": "second moment of",
}
_PASSES_ON = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "opt-barrier", "get-tuple-element")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARGUMENT = re.compile(r" parameter\((\d+)\)")
_LAYOUT = re.compile(r"\{[^}]*\}")
_GIVEN = "xla__device_data"  # torch_xla's name of every parameter
_FARTHEST = 6  # operations that are gone back through to one that has a line


@dataclass(frozen=True)
class Allocation:
    """A piece of HBM.

    Attributes:
        bytes: that it takes, padded to the tiles of its layout.
        unpadded_bytes: of its elements alone.
        shape: as XLA writes it, with the layout.
        what: the parameter's role and name, or the operation that makes it, as torch_xla and XLA name it.
        where: `file:line` of the Python statement behind it, the file as the user would type it; "" for a parameter, or
            where nothing says.
    """

    bytes: int
    unpadded_bytes: int
    shape: str
    what: str
    where: str


@dataclass(frozen=True)
class Usage:
    """HBM of a core while it runs a program, in bytes.

    Attributes:
        weights: what the model computes with, in its own dtype, buffers of the model too.
        optimizer: float32 masters, moments, and sums over micro-steps.
        inputs: the batch, the learning rate, and constants that travel as arguments.
        outputs: results that take no parameter's place.
        temporaries: needed at the fullest moment.
        gaps: lost between temporaries, because one that lives long lies between others.
        program: code and constants.
        vmem: of on-chip memory, needed by temporaries at its own fullest moment.
        largest: of what is there at the fullest moment, the largest first.
        unexplained: by which the compiler's own peak is higher (or lower, when negative) than it follows from the rest:
            it counts constants, but neither gaps nor code; of temporaries those in HBM or those in VMEM, whichever are
            more, so that the peak of a small program is too high by up to the size of VMEM. 0 for a refused program.
    """

    weights: int
    optimizer: int
    inputs: int
    outputs: int
    temporaries: int
    gaps: int
    program: int
    vmem: int
    largest: tuple[Allocation, ...]
    unexplained: int

    @property
    def peak_bytes(self) -> int:
        """Needed at the fullest moment, without code."""
        return self.weights + self.optimizer + self.inputs + self.outputs + self.temporaries

    @property
    def needed_bytes(self) -> int:
        """What must be free on the core for it to run: it fits when this is at most the HBM of a program."""
        return self.peak_bytes + self.gaps + self.program


def usage(verdict: "Verdict", parameters: Mapping[int, "Parameter"], num_largest: int = 10) -> Usage:
    """Reads what a program holds.

    Args:
        verdict: with `buffers`; accepted or refused.
        parameters: what the program's parameters are, by number. One that is missing counts as an input.
        num_largest: how many allocations to name.

    Raises:
        ValueError: the verdict has no buffers.
    """
    blocks = parse(verdict.buffers)
    if not blocks:
        raise ValueError("the compiler said nothing of the program's buffers")
    in_hbm = [block for block in blocks if block.space == HBM]
    temporary = [block for block in in_hbm if block.kind == "temporary"]
    held = [block for block in in_hbm if block.kind in ("parameter", "output")]
    moment, live = fullest(temporary)
    sizes = {"weights": 0, "optimizer": 0, "inputs": 0, "outputs": 0}
    for block in held:
        sizes[_kind(block, parameters)] += block.bytes
    constants = sum(block.bytes for block in in_hbm if block.kind == "constant")
    found = _Found(parse_program(verdict.text), parameters, temporary, moment)
    named = [*(_of_parameter(block, parameters) for block in held if block.kind == "parameter"), *found.allocations()]
    named.sort(key=lambda allocation: -allocation.bytes)
    _, vmem = fullest([block for block in blocks if block.space == VMEM])
    expected = sum(sizes.values()) + constants + max(live, vmem)
    return Usage(
        **sizes,
        temporaries=live,
        gaps=sum(block.bytes for block in temporary) - live,
        program=constants + verdict.code_bytes,
        vmem=vmem,
        largest=tuple(named[:num_largest]),
        unexplained=verdict.peak_bytes - expected if verdict.accepted else 0,
    )


def _kind(block: Block, parameters: Mapping[int, "Parameter"]) -> str:
    if block.kind == "output":
        return "outputs"
    known = parameters.get(block.parameter)
    if known is None or known.role == "input":
        return "inputs"
    return "optimizer" if known.role in _OPTIMIZER else "weights"


def _of_parameter(block: Block, parameters: Mapping[int, "Parameter"]) -> Allocation:
    # Others are put in a donated parameter's place when it is no longer needed.
    shape = min(block.values, key=lambda value: value.first).shape
    return Allocation(block.bytes, unpadded_bytes(shape), shape, _words(block.parameter, parameters), "")


def _words(number: int, parameters: Mapping[int, "Parameter"]) -> str:
    known = parameters.get(number)
    return f"{_ROLES.get(known.role, known.role)} {known.name}" if known else f"argument {number}"


def unpadded_bytes(shape: str) -> int:
    """Of the elements alone, whatever memory the shape is for."""
    return num_bytes(_LAYOUT.sub("", shape))


class _Found:
    """Temporaries that are needed at one moment, with the operations behind them."""

    def __init__(
        self, program: Program, parameters: Mapping[int, "Parameter"], temporary: Sequence[Block], moment: int
    ):
        self._program = program
        arguments = ((one, _ARGUMENT.search(one.text)) for one in program.computations.get(program.entry, []))
        self._arguments = {one.name: _words(int(found[1]), parameters) for one, found in arguments if found}
        self._by_name = {one.name: one for instructions in program.computations.values() for one in instructions}
        self._temporary, self._moment = temporary, moment

    def allocations(self) -> Iterator[Allocation]:
        for block in self._temporary:
            there = [value for value in block.values if value.first <= self._moment <= value.last]
            ends: set[int] = set()
            for value in sorted(there, key=lambda value: (value.offset, -value.bytes)):
                # Places that overlap are one, under the names that a loop gives to what it carries.
                if any(value.offset < end for end in ends):
                    continue
                ends = {value.offset + value.bytes}
                yield self._named(value, block.values)

    def _named(self, value: Value, all_values: Sequence[Value]) -> Allocation:
        makers = [self._by_name[name] for name in self._history(value, all_values) if name in self._by_name]
        origins = [origin for maker in makers for origin in self._origins(maker, _FARTHEST)]
        names = [name for origin in origins if (name := self._name(origin))]
        what = [*names, *(maker.opcode for maker in makers), value.instruction][0]
        file, _, line = next((origin.source for origin in origins if origin.source), "").rpartition(":")
        where = f"{shown(file)}:{line}" if file else ""
        return Allocation(value.bytes, unpadded_bytes(value.shape), value.shape, what, where)

    def _name(self, origin: Instruction) -> str:
        if origin.name in self._arguments:
            return f"copy of {self._arguments[origin.name]}"
        found = _OP_NAME.search(origin.text)
        return found[1] if found and found[1] != _GIVEN else ""

    def _history(self, value: Value, all_values: Sequence[Value]) -> list[str]:
        """Operations that had the same place from one to the next, those nearest to the moment first."""
        first, last, names = value.first, value.last, [value.instruction]
        same = [other for other in all_values if (other.offset, other.bytes) == (value.offset, value.bytes)]
        while more := [o for o in same if o.instruction not in names and o.first <= last and o.last >= first]:
            more.sort(key=lambda other: abs(other.first - self._moment))
            first, last = min(first, *(o.first for o in more)), max(last, *(o.last for o in more))
            names += dict.fromkeys(other.instruction for other in more)
        return names

    def _origins(self, maker: Instruction, farthest: int) -> Iterator[Instruction]:
        """An operation, and those behind it: what a fusion does last, and where a value that is passed on is from."""
        yield maker
        if maker.opcode == "fusion":
            yield from reversed(self._program.computations.get(called(maker, "calls"), []))
        elif farthest and maker.opcode in _PASSES_ON and maker.operands[:1]:
            operand = self._by_name.get(maker.operands[0])
            yield from self._origins(operand, farthest - 1) if operand else ()
