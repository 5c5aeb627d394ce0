"""Reads the text of a program that the TPU's compiler has compiled: its operations, its loops, its own time estimates.

In: `Verdict.text`. Out: how often each operation runs in a step, its predicted time, and the Python line it is from.

The compiler writes `estimated_cycles` on most fusions and matmuls. An operation in a loop body runs once a trip
(`trips.py`); of the branches of a condition, the costliest counts. Operations without an estimate are given the time
their bytes take to pass through HBM once each way; those that only rename a value, or run beside others (asynchronous
copies), are given none.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from xla_b2t.memory.trips import called, trips

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)"?')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->")
_SOURCE = re.compile(r'source_file="([^"]*)".*?source_line=(\d+)')
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}

# No work of their own, or work that runs beside other work.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|iota|partition-id|replica-id|after-all|domain|add-dependency|"
    "opt-barrier|(copy|slice)-(start|done)|async-(start|update|done)"
)
_COLLECTIVE = re.compile("(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?")
_COLLECTIVE_DONE = re.compile("(all-reduce|all-gather|collective-permute)-done")


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


@dataclass(frozen=True)
class Cost:
    """What one operation costs in a step.

    Attributes:
        instruction: the operation.
        times: how often it runs.
        cycles: of all its runs.
        kind: "compiler" (its own estimate), "bytes" (ours) or "collective".
        loops: names of the loops around it, outermost first.
    """

    instruction: Instruction
    times: int
    cycles: float
    kind: str
    loops: tuple[str, ...]


@dataclass
class Program:
    """The computations of a compiled program by name, each its instructions in order."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""


def parse(text: str) -> Program:
    """Reads a whole module."""
    program, current = Program(), None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = program.computations.setdefault(head.group(2), [])
            program.entry = head.group(2) if head.group(1) else program.entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found.group(2), found.group(3), bool(found.group(1))))
    return program


def costs(program: Program, bytes_per_cycle: float) -> list[Cost]:
    """The cost of every operation that runs, the loops' by their trips.

    Args:
        program: from `parse`.
        bytes_per_cycle: HBM bandwidth over the core's clock.
    """
    return list(_walk(program, program.entry, 1, (), bytes_per_cycle))


def _walk(program: Program, name: str, times: int, loops: tuple[str, ...], bytes_per_cycle: float) -> Iterator[Cost]:
    instructions = program.computations[name]
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    for instruction in instructions:
        if instruction.opcode == "while":
            turns = trips(program.computations, instruction, instructions)
            around = (*loops, instruction.name)
            yield from _walk(program, called(instruction, "body"), times * turns, around, bytes_per_cycle)
        elif instruction.opcode == "call":
            yield from _walk(program, called(instruction, "to_apply"), times, loops, bytes_per_cycle)
        elif instruction.opcode == "conditional":
            branches = [list(_walk(program, one, times, loops, bytes_per_cycle)) for one in _branches(instruction)]
            yield from max(branches, key=lambda branch: sum(cost.cycles for cost in branch))
        elif instruction.cycles is not None:
            yield Cost(instruction, times, times * instruction.cycles, "compiler", loops)
        elif _COLLECTIVE.fullmatch(instruction.opcode):
            yield Cost(instruction, times, 0.0, "collective", loops)
        elif not (_FREE.fullmatch(instruction.opcode) or _COLLECTIVE_DONE.fullmatch(instruction.opcode)):
            moved = _moved_bytes(instruction, [shapes.get(name, "") for name in instruction.operands])
            yield Cost(instruction, times, times * moved / bytes_per_cycle, "bytes", loops)


def _branches(conditional: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.text)
    return (
        re.findall(r"[\w.\-]+", listed.group(1))
        if listed
        else [called(conditional, "true_computation"), called(conditional, "false_computation")]
    )


def _moved_bytes(instruction: Instruction, operands: list[str]) -> int:
    """What it reads from HBM and writes there: of a whole that it only slices or updates in place, that part."""
    if instruction.opcode in ("slice", "dynamic-slice"):
        return num_bytes(instruction.shape) + _bytes_within(instruction.shape, operands[0])
    if instruction.opcode == "dynamic-update-slice":
        return num_bytes(operands[1]) + _bytes_within(operands[1], instruction.shape)
    return num_bytes(instruction.shape) + sum(map(num_bytes, operands))


def _bytes_within(part: str, whole: str) -> int:
    """Bytes of a part that lies where the whole does."""
    return 0 if "S(1)" in whole else num_bytes(_SHAPE.search(part).group())


def num_bytes(shape: str) -> int:
    """Bytes of a printed shape, all parts of a tuple together, without padding to tiles.

    What the compiler keeps in on-chip memory (`S(1)`) counts 0: it does not pass through HBM.

    Raises:
        ValueError: a type of element whose size its name does not say.
    """
    total = 0
    for found in re.finditer(_SHAPE.pattern + r"(\{[^}]*\})?", shape):
        kind, dimensions, layout = found.groups()
        if layout and "S(1)" in layout:
            continue
        total += -(-math.prod(_dimensions(f"{kind}[{dimensions}]")) * _bits(kind) // 8)
    return total


def _bits(kind: str) -> int:
    """Of one element: what the name counts first, as in s4, bf16, f8e4m3fn, c64."""
    count = re.match(r"[a-z]+(\d+)", kind)
    if kind not in _BITS and not count:
        raise ValueError(f"the elements {kind} are of a size that is not known")
    return _BITS[kind] if kind in _BITS else int(count.group(1))


def flops(program: Program, found: list[Cost]) -> float:
    """Operations of all matmuls and kernels, a multiplication and an addition counted as two, loops by their trips."""
    shapes = {one.name: one.shape for instructions in program.computations.values() for one in instructions}
    return sum(cost.times * _flops_of(program, cost.instruction, shapes) for cost in found)


def _flops_of(program: Program, instruction: Instruction, shapes: dict[str, str]) -> float:
    estimate = _FLOPS.search(instruction.text)
    if estimate:
        return int(estimate.group(1))
    inside = [instruction]
    if instruction.opcode == "fusion":
        inside = program.computations[called(instruction, "calls")]
    total = 0.0
    for one in inside:
        if one.opcode == "fusion":
            total += _flops_of(program, one, shapes)
        elif one.opcode == "convolution":
            total += 2.0 * math.prod(_dimensions(one.shape)) * _products(one, shapes)
    return total


def _products(matmul: Instruction, shapes: dict[str, str]) -> int:
    """Products that one output of a convolution sums up, which is what the compiler turns every matmul into.

    The axis `i` is summed, and each spatial axis as far as its window meets data: a batch of matmuls is a spatial axis
    spread so thin that a window meets one value of it.
    """
    left_labels, right_labels = _LABELS.search(matmul.text).groups()
    left, right = (_dimensions(shapes[name]) for name in matmul.operands[:2])
    described = re.search(r"window=\{([^}]*)\}", matmul.text)
    window = dict(re.findall(r"(\w+)=([\dx_]+)", described.group(1) if described else ""))
    total = right[right_labels.index("i")]
    for axis, size in enumerate(window.get("size", "").split("x")):
        if size:
            spread = int(window["lhs_dilate"].split("x")[axis]) if "lhs_dilate" in window else 1
            total *= min(-(-int(size) // spread), left[left_labels.index(str(axis))])
    return total


def _dimensions(shape: str) -> list[int]:
    """Its sizes; of one that only has a bound, the bound."""
    return [int(size.lstrip("<=")) for size in _SHAPE.search(shape).group(2).split(",") if size]


def by_source(found: list[Cost]) -> list[tuple[str, float]]:
    """Cycles by the Python line they are from, the costliest first."""
    totals: dict[str, float] = defaultdict(float)
    for cost in found:
        totals[cost.instruction.source or cost.instruction.opcode] += cost.cycles
    return sorted(totals.items(), key=lambda item: -item[1])


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    opcode = _OPCODE.search(" " + rest) if not rest.startswith("(") else _OPCODE.search(rest, _closing(rest))
    kind, start = opcode.group(1), opcode.end() - (0 if rest.startswith("(") else 1)
    shape = rest[: opcode.start() - (0 if rest.startswith("(") else 1)].strip() if opcode.start() else ""
    operands = tuple(_NAME.findall(rest[start : start + _closing("(" + rest[start:]) - 1]))
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


def _closing(text: str) -> int:
    """Index behind the parenthesis that closes the first one."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character == ")":
            return index + 1
    return len(text)
