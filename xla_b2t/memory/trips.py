"""How often a loop of a compiled program runs: its counter is counted, as the program counts it.

In: a `while` and the computations around it. Out: its trips. The condition and the body are run on what they hold in
scalar integers and nothing else. So it does not matter whether a counter goes up or down, by how much, how it is
compared, whether a compare stands in a fusion, or whether the counter has 64 bits, which the compiler keeps in two
words (torch_xla's own scan).
"""

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_b2t.memory.compiled_program import Instruction

Computations = dict[str, "list[Instruction]"]

_MOST_TRIPS = 100_000
"""No loop over time is as long; one that is still running then has a counter that is not understood."""
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SCALAR = re.compile(r"(pred|[su]\d+)\[\]")
_CONSTANT = re.compile(r" constant\((-?\w+)\)")
_RENAMES = ("copy", "bitcast", "opt-barrier", "convert", "bitcast-convert")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def trips(computations: Computations, loop: "Instruction", around: "list[Instruction]") -> int:
    """How often a `while` runs its body.

    Args:
        computations: all of the program, by name.
        loop: the instruction.
        around: the computation that it stands in, where its counter is started.

    Raises:
        ValueError: the program does not say.
    """
    known = _KNOWN.search(loop.text)
    if known:
        return int(known.group(1))
    condition, body = (_by_name(computations[called(loop, role)]) for role in ("condition", "body"))
    state = _Run(computations, _by_name(around), [])[loop.operands[0]]
    for turns in range(_MOST_TRIPS):
        goes_on = _Run(computations, condition, [state]).result() if state else None
        if goes_on is None:
            break
        if not goes_on:
            return turns
        after = _Run(computations, body, [state]).result()
        if after == state:
            break
        state = after
    raise ValueError(f"the trips of {loop.name} are not to be found in the program")


def called(instruction: "Instruction", role: str) -> str:
    """The computation that an instruction calls: `body`, `condition`, `calls`, `to_apply`."""
    return re.search(rf"\b{role}=%?([\w.\-]+)", instruction.text).group(1)


def _by_name(instructions: "list[Instruction]") -> "dict[str, Instruction]":
    """Instructions by name; the one that is returned also as "ROOT", which is no name."""
    named = {instruction.name: instruction for instruction in instructions}
    named["ROOT"] = next(instruction for instruction in instructions if instruction.is_root)
    return named


class _Run:
    """Values of one run of a computation, as far as they are asked for.

    A value is an integer; a list of values for a tuple; None where it is no scalar integer or not known.
    """

    def __init__(self, computations: Computations, by_name: "dict[str, Instruction]", arguments: list[Any]):
        self._computations = computations
        self._by_name = by_name
        self._arguments = arguments
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            instruction = self._by_name.get(name)
            self._values[name] = self._run(instruction) if instruction else None
        return self._values[name]

    def result(self) -> Any:
        """Value of the root."""
        return self["ROOT"]

    def _run(self, instruction: "Instruction") -> Any:
        scalar = _SCALAR.match(instruction.shape)
        if not scalar and not instruction.shape.startswith("("):
            return None
        value = self._apply(instruction)
        return _wrapped(value, scalar.group(1)) if scalar and isinstance(value, int) else value

    def _apply(self, instruction: "Instruction") -> Any:
        opcode, text = instruction.opcode, instruction.text
        if opcode == "constant":
            constant = _CONSTANT.search(text).group(1)
            return {"true": 1, "false": 0}[constant] if constant in ("true", "false") else int(constant)
        if opcode == "parameter":
            index = int(re.search(r" parameter\((\d+)\)", text).group(1))
            return self._arguments[index] if index < len(self._arguments) else None
        if opcode not in ("tuple", "get-tuple-element", "fusion", "call", "copy-start", "copy-done", "select"):
            return self._arithmetic(instruction)
        values = [self[name] for name in instruction.operands]
        if opcode == "tuple":
            return values
        if opcode == "get-tuple-element":
            return values[0][int(re.search(r"\bindex=(\d+)", text).group(1))] if values[0] else None
        if opcode in ("fusion", "call"):
            inside = self._computations[called(instruction, "calls" if opcode == "fusion" else "to_apply")]
            return _Run(self._computations, _by_name(inside), values).result()
        if opcode == "copy-start":
            return [*values, *values, None]
        if opcode == "copy-done":
            return values[0][0] if values[0] else None
        return None if values[0] is None else values[1 if values[0] else 2]

    def _arithmetic(self, instruction: "Instruction") -> Any:
        opcode = instruction.opcode
        compare = re.search(r"\bdirection=(\w+)", instruction.text) if opcode == "compare" else None
        function = _COMPARE[compare.group(1)] if compare else _BINARY.get(opcode)
        if function is None and opcode not in (*_RENAMES, "not"):
            return None
        values = [self[name] for name in instruction.operands]
        if opcode in _RENAMES:
            return values[0]
        if None in values:
            return None
        return int(function(*values)) if function else ~values[0]


def _wrapped(value: int, kind: str) -> int:
    """The value that so many bits hold."""
    bits = 1 if kind == "pred" else int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value
