"""What a core does in a step, one operation after the other, and how long each of them takes.

In: a compiled program. Out: its `Part`s.

The operations of a core run one after the other, in the order of the text; loops count by their trips (`trips.py`), of
the branches of a condition the longest. An operation takes what the compiler estimates (`estimated_cycles`), but no
longer than its own work does at nine tenths of the datasheet's rates. For the compiler's estimate charges every window
of an operation with the latency of a transfer (1.2 us on v5e and v6e, 0.8 on v4), although it keeps up to six windows
in flight, and charges results narrower than 32 bits for three times their bytes: a copy of bf16 comes out at 2.5 times
the datasheet's limit, and zeroing on-chip memory at 90 times. Where the work cannot be counted (`work.py`)
the estimate stands.

Copies that the compiler starts early run beside other operations, with what those leave of HBM's bandwidth, and what is
not done when it is needed is waited for; collectives that are started early likewise, over the links. A Pallas kernel
has no estimate: it takes its own `cost_estimate`, products or bytes, whichever is more, as has anything else without.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from xla_b2t.memory.chips import Chip
from xla_b2t.memory.collectives import collective_in, ring_gb_s, sent_bytes
from xla_b2t.memory.compiled_program import Instruction, Program, arrays
from xla_b2t.memory.trips import called, trips
from xla_b2t.memory.work import Work, work_of

MATRIX, HBM, LINKS, OTHER = "matrix units", "HBM bandwidth", "links between chips", "other"
"""What limits an operation: that which it keeps busy for half of its time or more."""

_REACHED = 0.9
"""Of the datasheet's rates; the compiler's estimates assume it of the HBM of v5e."""
_START_MS = 1.2e-3
"""Until the first bytes come: what the compiler's estimates for v5e and v6e have for each window, once."""
_LANES = 1024 * 2
"""Elements of which a core does one instruction each cycle: a vector of 8 x 128, two of the four slots filled."""
_TWO_CORES = ("v4", "v5p")
"""Chips whose two TensorCores work as one; a Pallas kernel runs on one of them if it does not say otherwise."""

_WINDOWS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|iota|partition-id|replica-id|after-all|domain|add-dependency|"
    "opt-barrier"
)
_FREE_CALL = re.compile('custom_call_target="(ConcatBitcast|AllocateBuffer|AssumeGatherIndicesInBound)"')


@dataclass(frozen=True)
class Part:
    """What one operation takes in a step, in all its runs.

    Attributes:
        source: `file:line` of the Python statement it is from; its opcode where that is not known.
        opcode: XLA's name of the operation.
        ms: predicted.
        compiler_ms: by the compiler's own estimate, as it is; 0 without.
        limit: MATRIX, HBM, LINKS or OTHER.
        is_kernel: it is a Pallas kernel.
        in_loop: it is inside of a loop.
        flops, hbm_bytes, sent_bytes: of all its runs.
    """

    source: str
    opcode: str
    ms: float
    compiler_ms: float = 0.0
    limit: str = OTHER
    is_kernel: bool = False
    in_loop: bool = False
    flops: float = 0.0
    hbm_bytes: float = 0.0
    sent_bytes: float = 0.0


@dataclass
class _Queue:
    """Transfers that were started and run one after the other, beside the operations of the core.

    Attributes:
        asked_ms: time that all of them take that were ever started.
        done_ms: time that was spent on them.
        until_ms: by the name of what started it, where in that time a transfer is done.
    """

    asked_ms: float = 0.0
    done_ms: float = 0.0
    until_ms: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, ms: float) -> None:
        self.asked_ms += ms
        self.until_ms[name] = self.asked_ms

    def pass_time(self, ms: float) -> None:
        """For so long, nothing else was in their way."""
        self.done_ms = min(self.asked_ms, self.done_ms + ms)

    def wait_ms(self, until_ms: float) -> float:
        """Time until that point, which passes."""
        wait = max(0.0, until_ms - self.done_ms)
        self.done_ms += wait
        return wait


class Timeline:
    """A step of a compiled program on one core of so many.

    Attributes:
        unknown_loops: names of loops whose trips the program does not say, once the parts were asked for.
    """

    def __init__(self, program: Program, chip: Chip, num_cores: int):
        self.program, self.chip, self.num_cores = program, chip, num_cores
        self.unknown_loops: list[str] = []
        self._cycles_per_ms = chip.clock_ghz * 1e6
        self._flops_per_ms, self._bytes_per_ms = chip.bf16_tflops * 1e9, chip.hbm_gb_s * 1e6
        self._sent_per_ms = ring_gb_s(chip) * 1e6 * _REACHED

    def parts(self) -> Iterator[Part]:
        """All that takes time or moves bytes."""
        return self._parts_of(self.program.entry, 1)

    def _parts_of(self, name: str, times: int, in_loop: bool = False) -> Iterator[Part]:
        """What a computation takes that runs so often."""
        instructions = self.program.computations[name]
        queues = {HBM: _Queue(), LINKS: _Queue()}
        sources = _sources(self.program, instructions)
        for instruction in instructions:
            inner = self._inner(instruction, instructions, times, in_loop)
            if inner is None:
                source = sources[instruction.name] or instruction.opcode
                inner = (_scaled(part, times, in_loop) for part in self._once(instruction, source, queues))
            for part in inner:
                for limit, queue in queues.items():
                    queue.pass_time(self._spare_ms(part, limit) / times)
                yield part
        for limit, queue in queues.items():  # what is waited for in the next turn of a loop
            ms = queue.wait_ms(queue.asked_ms)
            if ms:
                yield _scaled(Part("copy-done", "copy-done", ms, limit=limit), times, in_loop)

    def _inner(
        self, instruction: Instruction, around: list[Instruction], times: int, in_loop: bool
    ) -> Iterator[Part] | None:
        """What the computations take that an instruction runs; None for one that is an operation by itself."""
        if instruction.opcode == "while":
            try:
                turns = trips(self.program.computations, instruction, around)
            except (ValueError, RecursionError):
                self.unknown_loops.append(instruction.name)
                turns = 1
            return self._parts_of(called(instruction, "body"), times * turns, True) if turns else iter(())
        if instruction.opcode == "call":
            return self._parts_of(called(instruction, "to_apply"), times, in_loop)
        if instruction.opcode == "conditional":
            branches = [list(self._parts_of(name, times, in_loop)) for name in _branches(instruction)]
            return iter(max(branches, key=lambda parts: sum(part.ms for part in parts)))
        return None

    def _once(self, instruction: Instruction, source: str, queues: dict[str, _Queue]) -> Iterator[Part]:
        """What one operation takes in one run, and what it waits for."""
        opcode = instruction.opcode
        collective = collective_in(self.program, instruction)
        if collective is not None:
            sent = sent_bytes(self.program, collective, self.num_cores)
            ms = sent / self._sent_per_ms
            if opcode.endswith("-start"):
                queues[LINKS].start(instruction.name, ms)
                ms = 0.0
            yield Part(source, opcode, ms, limit=LINKS, sent_bytes=sent)
        elif opcode.endswith("-start"):
            moved = self._copied(instruction)
            queues[HBM].start(instruction.name, moved / self._bytes_per_ms / _REACHED)
            yield Part(source, opcode, 0.0, limit=HBM, hbm_bytes=moved)
        elif opcode.endswith(("-update", "-done")):
            for limit, queue in queues.items():
                until = queue.until_ms.get(instruction.operands[0])
                if until is not None and opcode.endswith("-update"):
                    queue.until_ms[instruction.name] = until
                elif until is not None:
                    yield Part(source, opcode, queue.wait_ms(until), limit=limit)
        elif not (_FREE.fullmatch(opcode) or (opcode == "custom-call" and _FREE_CALL.search(instruction.text))):
            yield self._operation(instruction, source)

    def _operation(self, instruction: Instruction, source: str) -> Part:
        is_kernel = '"tpu_custom_call"' in instruction.text
        work = work_of(self.program, instruction)
        if is_kernel and self.chip.name in _TWO_CORES:
            work = replace(work, matrix_flops=2 * work.matrix_flops)
        estimate_ms = (instruction.cycles or 0) / self._cycles_per_ms
        return Part(
            source,
            instruction.opcode,
            ms := self._operation_ms(instruction, work, estimate_ms),
            estimate_ms,
            self._limit(work, ms),
            is_kernel,
            flops=work.flops,
            hbm_bytes=work.hbm_bytes,
        )

    def _operation_ms(self, instruction: Instruction, work: Work, estimate_ms: float) -> float:
        ms = [
            work.matrix_flops / self._flops_per_ms / _REACHED,
            work.hbm_bytes / self._bytes_per_ms / _REACHED,
            (work.vector_elements or 0.0) / _LANES / self._cycles_per_ms,
        ]
        if instruction.cycles is None:
            return max(ms)
        if work.vector_elements is None:
            return estimate_ms
        # Window for window, the shorter work beside the longest; of the first window one after the other.
        return min(estimate_ms, _START_MS + max(ms) + (sum(ms) - max(ms)) / _windows(instruction))

    def _limit(self, work: Work, ms: float) -> str:
        busy_ms = {MATRIX: work.flops / self._flops_per_ms, HBM: work.hbm_bytes / self._bytes_per_ms}
        longest = max(busy_ms, key=busy_ms.__getitem__)
        return longest if busy_ms[longest] >= ms / 2 and ms else OTHER

    def _spare_ms(self, part: Part, limit: str) -> float:
        """Time in which an operation leaves HBM or the links alone; while they are waited for they are busy."""
        if part.limit == limit and part.opcode.endswith("-done"):
            return 0.0
        busy_ms = (
            part.hbm_bytes / self._bytes_per_ms / _REACHED if limit == HBM else part.sent_bytes / self._sent_per_ms
        )
        return max(0.0, part.ms - busy_ms)

    def _copied(self, start: Instruction) -> float:
        """Bytes through HBM of a copy that is started early: of what arrives, at each of its ends that lies there."""
        if start.opcode == "async-start":
            inside = self.program.computations[called(start, "calls")]
            return sum(work_of(self.program, each).hbm_bytes for each in inside if not _FREE.fullmatch(each.opcode))
        ends = [array for array in arrays(start.shape) if array.dimensions or array.in_hbm]
        return min((array.padded_bytes for array in ends), default=0) * sum(array.in_hbm for array in ends)


def _scaled(part: Part, times: int, in_loop: bool) -> Part:
    """Of so many runs."""
    return replace(
        part,
        in_loop=in_loop,
        ms=part.ms * times,
        compiler_ms=part.compiler_ms * times,
        flops=part.flops * times,
        hbm_bytes=part.hbm_bytes * times,
        sent_bytes=part.sent_bytes * times,
    )


def _windows(instruction: Instruction) -> int:
    """Pieces that the compiler cuts the work of an operation into."""
    found = _WINDOWS.search(instruction.text)
    return math.prod(int(bound.strip('"')) for bound in found.group(1).split(",") if bound) if found else 1


def _branches(conditional: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.text)
    if listed:
        return re.findall(r"[\w.\-]+", listed.group(1))
    return [called(conditional, "true_computation"), called(conditional, "false_computation")]


def _sources(program: Program, instructions: list[Instruction]) -> dict[str, str]:
    """The Python line of each operation; of what the compiler added, that of what it was added for."""
    found: dict[str, str] = {}
    for instruction in reversed(instructions):
        source = instruction.source
        if not source and instruction.opcode == "fusion":
            inside = program.computations[called(instruction, "calls")]
            matmuls = [each for each in inside if each.opcode == "convolution"]
            source = next((each.source for each in (*matmuls, *reversed(inside)) if each.source), "")
        found[instruction.name] = source or found.get(instruction.name, "")
        for name in instruction.operands:
            found[name] = found[instruction.name] or found.get(name, "")
    return found
