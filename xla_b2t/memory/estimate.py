"""HBM that a step takes on a TPU core, by arithmetic: from the traced program, without a compiler.

In: the program's text, and what its parameters are. Out: bytes at the fullest moment, by what they are for, and the
largest values with the Python lines that make them. What is counted: arguments, padded to tiles, with the outputs that
take their place; and what is alive at that moment of the values that reach memory (`kernels.py`, `liveness.py`).

The compiler schedules and lays out in its own way, and where HBM gets scarce it recomputes: `MARGIN` says by how much
more than the estimate a step may need.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xla_b2t.memory.kernels import Value, gather, graph_of
from xla_b2t.memory.layout import padded_bytes, plain_bytes
from xla_b2t.memory.liveness import Peak, Task, lowest_peak
from xla_b2t.memory.traced_program import Array, Operation, Traced, parse, written_out
from xla_b2t.training.traced import Parameter

MARGIN = 0.25
"""Share of an estimate that is added before it is compared with a core's HBM; docs/BENCHMARKS.md has the errors."""

_PARTS = {
    "weight": "weights",
    "master": "optimizer",
    "moment1": "optimizer",
    "moment2": "optimizer",
    "sum": "optimizer",
    "input": "inputs",
}
_INTO = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Held:
    """Something in memory at the fullest moment.

    Attributes:
        bytes: with padding.
        unpadded_bytes: without.
        shape: element type and sizes, as XLA prints them.
        part: what it is for, a key of `Estimate.parts`.
        what: the tensor's name in the run; of what the step makes, XLA's name of the operation.
        where: `file:line` of the Python statement that makes it; "" when unknown, and of an argument.
    """

    bytes: int
    unpadded_bytes: int
    shape: str
    part: str
    what: str
    where: str


@dataclass(frozen=True)
class Estimate:
    """What a program takes.

    Attributes:
        num_bytes: at the fullest moment, arguments included; what the compiler calls the peak.
        parts: the same by what it is for: "weights", "optimizer" (sums over micro-steps too), "inputs" (and
            constants that travel as arguments), "gradients", "activations" (everything else that the step makes).
        largest: the largest that are held then.
    """

    num_bytes: int
    parts: dict[str, int]
    largest: tuple[Held, ...]

    @property
    def with_margin_bytes(self) -> int:
        """What must be free for the step to be sure to fit, as far as arithmetic can be sure."""
        return math.ceil(self.num_bytes * (1 + MARGIN))


def estimate(text: str, parameters: Mapping[int, Parameter] | None = None, num_largest: int = 10) -> Estimate:
    """Adds a program up.

    Args:
        text: from `xla/trace.py: hlo_text`.
        parameters: what the program's parameters are by number, from `TracedRun.parameters`; those that are missing
            count as inputs.
        num_largest: values to name.

    Raises:
        ValueError: the text is no HLO program.
    """
    program = parse(text)
    operations = written_out(program, program.entry)
    held = [_argument(one, parameters or {}) for one in operations if one.opcode == "parameter"]
    space = _Space(program, operations, is_entry=True)
    peak = space.peak()
    gradients = space.gradients()
    for buffer in peak.alive:
        held += space.held(buffer, "gradients" if buffer in gradients else "activations")
    parts: dict[str, int] = defaultdict(int)
    for one in held:
        parts[one.part] += one.bytes
    parts["activations"] += peak.num_bytes - sum(space.sizes[buffer] for buffer in peak.alive)
    held.sort(key=lambda one: -one.bytes)
    return Estimate(sum(parts.values()), dict(parts), tuple(held[:num_largest]))


class _Space:
    """The memory of one computation: its entry, or a loop's body.

    Args:
        program: that it is a part of.
        operations: of the computation.
        is_entry: a body's parameters are buffers of the loop around it, which the body may change in place.
    """

    def __init__(self, program: Traced, operations: list[Operation], is_entry: bool):
        self._program = program
        self._found = gather(operations)
        self._is_entry = is_entry
        self._readers: dict[Value, set[int]] = defaultdict(set)
        for place, kernel in self._found.kernels.items():
            for value in kernel.reads:
                self._readers[value].add(place)
        self._buffer_of: dict[Value, int] = {}
        self.sizes: list[int] = []
        self._first: list[Value] = []
        self._donated = program.aliases.keys() if is_entry else set()
        donated = {self._found.results[output] for output in self._donated}
        for place in sorted(self._found.kernels):
            kernel = self._found.kernels[place]
            shared = self._shared(place)
            for index, num_bytes in enumerate(kernel.writes):
                value = (place, index)
                if index in shared:
                    if shared[index] in self._buffer_of:
                        self._buffer_of[value] = self._buffer_of[shared[index]]
                elif value not in donated or index in kernel.ordered:
                    self._buffer_of[value] = len(self.sizes)
                    self.sizes.append(num_bytes)
                    self._first.append(value)

    def peak(self) -> Peak:
        """Its fullest moment."""
        kernels = self._found.kernels
        number_of = {place: number for number, place in enumerate(sorted(kernels))}
        begun: set[int] = set()
        tasks = []
        for place in sorted(kernels):
            kernel = kernels[place]
            touched = {self._buffer_of.get((place, index), -1) for index in range(len(kernel.writes))} - {-1}
            makes = touched - begun
            begun |= makes
            read = {self._buffer_of[value] for value in kernel.reads if value in self._buffer_of}
            waits_for = frozenset(number_of[source] for source, _ in kernel.reads if source in number_of)
            extra = self._extra_bytes(kernel.operation) + kernel.copied_bytes
            tasks.append(Task(tuple(makes), frozenset((read | touched) - makes), waits_for, extra, kernel.in_place))
        results = [value for output, value in enumerate(self._found.results) if output not in self._donated]
        kept = {self._buffer_of[value] for value in results if value in self._buffer_of}
        return lowest_peak(tasks, self.sizes, kept)

    def held(self, buffer: int, part: str) -> list[Held]:
        """What a buffer holds."""
        place, index = self._first[buffer]
        operation = self._found.graph.operations[place]
        held = _held(operation.arrays[index], part, operation.name, operation.source)
        return [replace(held, bytes=self.sizes[buffer])]

    def gradients(self) -> set[int]:
        """Buffers of what the new state is made of and has the state's sizes, back to the matmul or the sum it is from.

        With a sharded optimizer a gradient is larger than the state: as many times as there are ranks.
        """
        graph, kernels = self._found.graph, self._found.kernels
        found: set[int] = set()
        for output in self._program.aliases:
            place, index = self._found.results[output]
            count = math.prod(graph.operations[place].arrays[index][1])
            pending, seen = [place], {place}
            while pending and count > 1:
                kernel = kernels.get(pending.pop())
                for source, which in kernel.reads if kernel else ():
                    size = math.prod(graph.operations[source].arrays[which][1])
                    if source in kernels and source not in seen and size >= count and size % count == 0:
                        seen.add(source)
                        found |= {self._buffer_of[source, which]} if (source, which) in self._buffer_of else set()
                        pending += [] if kernels[source].ends_gradient else [source]
        return found

    def _shared(self, place: int) -> dict[int, Value]:
        """Results of a kernel that are written in the place of what it reads: index -> the value."""
        operation, reads = self._found.kernels[place].operation, self._found.graph.reads[place]
        if operation.opcode in _INTO and self._is_free(reads[0], place):
            return {0: reads[0]}
        if operation.opcode != "while":
            return {}
        unchanged = _unchanged(self._program, operation.called["body"])
        given = enumerate(reads)
        return {index: value for index, value in given if index in unchanged or self._is_free(value, place)}

    def _is_free(self, value: Value, place: int) -> bool:
        """Whether nobody else reads a value, so that a kernel may write over it."""
        is_ours = value[0] in self._found.kernels or not self._is_entry
        return is_ours and self._readers[value] <= {place}

    def _extra_bytes(self, operation: Operation) -> int:
        called = [name for role, name in operation.called.items() if role not in ("to_apply", "condition")]
        return max((_body_bytes(self._program, name) for name in called), default=0)


def _body_bytes(program: Traced, name: str) -> int:
    return _Space(program, written_out(program, name), is_entry=False).peak().num_bytes


def _unchanged(program: Traced, body: str) -> set[int]:
    """Numbers of what a loop hands on as it was."""
    operations = written_out(program, body)
    results = graph_of(operations).values[-1]
    return {
        index
        for index, (place, which) in enumerate(results)
        if operations[place].opcode == "parameter" and which == index
    }


def _argument(operation: Operation, parameters: Mapping[int, Parameter]) -> Held:
    (array,) = operation.arrays
    known = parameters.get(int(operation.argument))
    part = _PARTS[known.role] if known else "inputs"
    return _held(array, part, known.name if known else f"argument {operation.argument}", "")


def _held(array: Array, part: str, name: str, source: str) -> Held:
    kind, sizes = array
    shape = f"{kind}[{','.join(map(str, sizes))}]"
    return Held(padded_bytes(*array), plain_bytes(*array), shape, part, name, source)
