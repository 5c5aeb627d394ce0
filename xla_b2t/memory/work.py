"""What one operation of a compiled program does: products, bytes through HBM, vector work.

In: an instruction. Out: its `Work`, counted from its shapes, and for a fusion from what is fused.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from xla_b2t.memory.compiled_program import Array, Instruction, Program, arrays, hbm_bytes, num_bytes
from xla_b2t.memory.trips import called
from xla_b2t.xla.target import FEWEST_ROWS

_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)"?')
_ACCESSED = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)"?')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_PARTS = ("slice", "dynamic-slice", "gather")
_RENAMES = ("bitcast", "parameter", "constant", "tuple", "get-tuple-element")

_EDGE = 128  # of a matrix unit

# Instructions that a vector of elements takes in each operation, rather too many than too few.
_LIGHT = (
    "add subtract multiply maximum minimum and or xor not negate abs compare select clamp convert sign floor ceil "
    "round-nearest-afz round-nearest-even shift-left shift-right-logical shift-right-arithmetic bitcast-convert "
    "is-finite iota broadcast reduce-precision copy"
)
_HEAVY = (
    "divide sqrt rsqrt cbrt exponential exponential-minus-one log log-plus-one tanh logistic power remainder erf "
    "rng-bit-generator"
)
_WEIGHTS = {
    **dict.fromkeys(_RENAMES, 0),
    **dict.fromkeys(_LIGHT.split(), 1),
    **dict.fromkeys(["slice", "dynamic-slice", "dynamic-update-slice", "pad", "concatenate", "reshape"], 4),
    **dict.fromkeys(_HEAVY.split(), 20),
    **dict.fromkeys(["sine", "cosine", "tan", "atan2"], 60),
}
_STORE = 2  # a vector is stored each cycle, and two instructions are counted to one


@dataclass(frozen=True)
class Work:
    """What one run of an operation does.

    Attributes:
        flops: of its products, a multiplication and an addition counted as two.
        matrix_flops: the same with the rows and columns of the matrix units that stay empty.
        hbm_bytes: that it reads from HBM and writes there, once each, in whole tiles.
        vector_elements: instructions times elements of its element-wise part; None where that is not to be counted.
    """

    flops: float = 0.0
    matrix_flops: float = 0.0
    hbm_bytes: int = 0
    vector_elements: float | None = None


def work_of(program: Program, instruction: Instruction) -> Work:
    """Counts one operation."""
    operands = [program.shapes.get(name, "") for name in instruction.operands]
    if instruction.opcode == "custom-call":
        return _kernel(instruction, operands)
    inside = [instruction]
    if instruction.opcode == "fusion":
        inside = program.computations[called(instruction, "calls")]
    flops, filled = _flops(program, inside)
    vector = _vector(program, inside)
    if vector is not None:
        vector += _STORE * sum(_elements(_new(program, result)) for result in _results(inside))
    return Work(flops, filled, _moved(program, instruction, operands), vector)


def _kernel(call: Instruction, operands: list[str]) -> Work:
    """By what it says of itself; what it reads more than once is added to what passes through HBM."""
    flops, accessed = _FLOPS.search(call.text), _ACCESSED.search(call.text)
    count = float(flops.group(1)) if flops else 0.0
    shapes = [call.shape, *operands]
    again = max(0, int(accessed.group(1)) - sum(map(num_bytes, shapes))) if accessed else 0
    return Work(count, count, sum(map(hbm_bytes, shapes)) + again)


def _moved(program: Program, instruction: Instruction, operands: list[str]) -> int:
    """Bytes that pass through HBM: of a whole that is only sliced or updated in place, that part."""
    if instruction.opcode == "fusion":
        inside = program.computations[called(instruction, "calls")]
        read = sum(_read(program, inside, index, hbm_bytes(shape)) for index, shape in enumerate(operands))
        return read + _written(program, inside, instruction.shape)
    if instruction.opcode in _PARTS:
        return hbm_bytes(instruction.shape) + _within(instruction.shape, operands[0])
    if instruction.opcode == "dynamic-update-slice":
        return hbm_bytes(operands[1]) + _within(operands[1], instruction.shape)
    return hbm_bytes(instruction.shape) + sum(map(hbm_bytes, operands))


def _within(part: str, whole: str) -> int:
    """Bytes of a part that lies where the whole does."""
    return sum(array.padded_bytes for array in arrays(part)) if hbm_bytes(whole) else 0


def _read(program: Program, inside: list[Instruction], index: int, whole: int) -> int:
    """Of a fusion's parameter of so many bytes, those that it reads."""
    parameter = next((each for each in inside if _is_parameter(each, index)), None)
    if not whole or parameter is None:
        return whole
    users = defaultdict(list)
    for each in inside:
        for place, name in enumerate(each.operands):
            users[name].append((each, place))
    total, pending = 0, [parameter.name]
    while pending and total < whole:
        for user, place in users[pending.pop()]:
            if user.opcode == "bitcast" or (user.opcode == "fusion" and _only_renames(program, user)):
                pending.append(user.name)
            elif user.opcode in _PARTS and place == 0:
                total += sum(array.padded_bytes for array in arrays(user.shape))
            elif user.opcode == "fusion":
                total += _read(program, program.computations[called(user, "calls")], place, whole)
            elif user.opcode != "dynamic-update-slice" or place:
                total = whole
    return min(total, whole)


def _written(program: Program, inside: list[Instruction], shape: str) -> int:
    """Of a fusion's result, the bytes that it writes to HBM."""
    by_name = {each.name: each for each in inside}
    results, outputs = _results(inside), arrays(shape)
    if len(results) != len(outputs):
        return hbm_bytes(shape)
    total = 0
    for result, output in zip(results, outputs, strict=True):
        while result.opcode == "bitcast" and result.operands[0] in by_name:
            result = by_name[result.operands[0]]
        updated = _update(program, result)
        total += output.in_hbm * (output.padded_bytes if updated is None else min(updated, output.padded_bytes))
    return total


def _update(program: Program, result: Instruction) -> int | None:
    """Bytes of the part that is updated in place; None where all is written."""
    while result.opcode == "fusion":
        result = next(each for each in program.computations[called(result, "calls")] if each.is_root)
    if result.opcode != "dynamic-update-slice":
        return None
    return sum(array.padded_bytes for array in arrays(program.shapes.get(result.operands[1], "")))


def _is_parameter(instruction: Instruction, index: int) -> bool:
    return instruction.opcode == "parameter" and _PARAMETER.search(instruction.text).group(1) == str(index)


def _flops(program: Program, inside: list[Instruction]) -> tuple[float, float]:
    """Of all matmuls: their operations, and those that the matrix units have time for meanwhile."""
    total, filled = 0.0, 0.0
    for one in inside:
        if one.opcode == "fusion":
            more = _flops(program, program.computations[called(one, "calls")])
            total, filled = total + more[0], filled + more[1]
        elif one.opcode == "convolution":
            outputs, products = math.prod(arrays(one.shape)[0].dimensions), _products(one, program.shapes)
            total += 2.0 * outputs * products
            filled += 2.0 * outputs * products * _emptiness(one, program.shapes)
    return total, filled


def _products(matmul: Instruction, shapes: dict[str, str]) -> int:
    """Products that one output of a convolution sums up, which is what the compiler turns every matmul into.

    The axis `i` is summed, and each spatial axis as far as its window meets data: a batch of matmuls is a spatial axis
    spread so thin that a window meets one value of it.
    """
    left_labels, right_labels, _ = _LABELS.search(matmul.text).groups()
    left, right = (arrays(shapes[name])[0].dimensions for name in matmul.operands[:2])
    described = re.search(r"window=\{([^}]*)\}", matmul.text)
    window = dict(re.findall(r"(\w+)=([\dx_]+)", described.group(1) if described else ""))
    total = right[right_labels.index("i")]
    for axis, size in enumerate(window.get("size", "").split("x")):
        if size:
            spread = int(window["lhs_dilate"].split("x")[axis]) if "lhs_dilate" in window else 1
            total *= min(-(-int(size) // spread), left[left_labels.index(str(axis))])
    return total


def _emptiness(matmul: Instruction, shapes: dict[str, str]) -> float:
    """How much longer it takes than its products: whichever operand is held, its tiles are whole."""
    _, right_labels, labels = _LABELS.search(matmul.text).groups()
    output = arrays(matmul.shape)[0].dimensions
    rows, columns = output[labels.index("b")], output[labels.index("f")]
    summed = arrays(shapes[matmul.operands[1]])[0].dimensions[right_labels.index("i")]
    held = max(_whole(rows) * max(columns, FEWEST_ROWS), _whole(columns) * max(rows, FEWEST_ROWS))
    return _whole(summed) * held / max(1, summed * rows * columns)


def _whole(size: int) -> int:
    return -(-size // _EDGE) * _EDGE


def _vector(program: Program, inside: list[Instruction]) -> float | None:
    """Element-wise work; None where something is not element-wise, or is done again for each window of a matmul."""
    by_name = {each.name: each for each in inside}
    total = 0.0
    for one in inside:
        within: float | None = 0.0
        if one.opcode == "fusion":
            within = _vector(program, program.computations[called(one, "calls")])
        elif one.opcode == "convolution":
            is_plain = all(_is_plain(program, by_name, name) for name in one.operands[:2])
            within = 0.0 if is_plain and "operand_precision" not in one.text else None
        elif one.opcode == "reduce":
            within = 2.0 * max(_elements(program.shapes.get(name, "")) for name in one.operands)
        elif one.opcode in _WEIGHTS and _keeps_order(program, one):
            within = _WEIGHTS[one.opcode] * _elements(_new(program, one))
        else:
            within = None
        if within is None:
            return None
        total += within
    return total


def _results(inside: list[Instruction]) -> list[Instruction]:
    """What a fusion returns, or the operation that stands alone."""
    root = next((each for each in inside if each.is_root), inside[0])
    by_name = {each.name: each for each in inside}
    return [by_name[name] for name in root.operands if name in by_name] if root.opcode == "tuple" else [root]


def _new(program: Program, result: Instruction) -> str:
    """The shape of what an operation makes: of a whole that is updated in place, that part."""
    if result.opcode == "dynamic-update-slice":
        return program.shapes.get(result.operands[1], "")
    return result.shape


def _is_plain(program: Program, by_name: dict[str, Instruction], name: str) -> bool:
    """Whether an operand of a matmul is as the fusion was given it."""
    one = by_name.get(name)
    while one is not None and one.opcode == "bitcast":
        one = by_name.get(one.operands[0])
    return one is None or one.opcode == "parameter" or (one.opcode == "fusion" and _only_renames(program, one))


def _only_renames(program: Program, fusion: Instruction) -> bool:
    return all(each.opcode in _RENAMES for each in program.computations[called(fusion, "calls")])


def _keeps_order(program: Program, one: Instruction) -> bool:
    """False where elements change their order in memory, which takes the units that cross lanes."""
    if one.opcode not in ("copy", "reshape"):
        return True
    before, after = arrays(program.shapes.get(one.operands[0], "")), arrays(one.shape)
    if one.opcode == "reshape":
        return [_long(each) for each in before] == [_long(each) for each in after]
    return [(each.order, each.tile) for each in before] == [(each.order, each.tile) for each in after]


def _long(array: Array) -> list[int]:
    return [size for size in array.dimensions if size > 1]


def _elements(shape: str) -> int:
    return sum(array.padded_elements for array in arrays(shape))
