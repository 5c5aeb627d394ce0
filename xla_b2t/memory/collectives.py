"""What an operation sends to other chips.

In: a collective of a compiled program. Out: the bytes that each device sends, and receives, over its links.

The compiler passes large buffers around a ring of all devices, half of each in either direction ("UniDirection1DRing"
of two colours, as it writes beside them), so two links of a chip are busy. In a ring of n an array of V bytes takes
(n-1)/n V to gather or to reduce and scatter, and both to reduce: the least that any algorithm sends.

Source: Patarasu and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, doi
10.1016/j.jpdc.2008.09.002; for rings and links of TPUs https://jax-ml.github.io/scaling-book/sharding.
"""

import re

from xla_b2t.memory.chips import Chip
from xla_b2t.memory.compiled_program import Instruction, Program, num_bytes
from xla_b2t.memory.trips import called

_OPCODE = re.compile("(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_LINKS = {"v2": 2, "v3": 2, "v4": 6, "v5p": 6}
"""Of a device, where it is not four; two devices share the four links of a chip of v2 and v3."""


def collective_in(program: Program, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is, or wraps; None without."""
    if _OPCODE.fullmatch(instruction.opcode):
        return instruction
    if instruction.opcode in ("async-start", "fusion"):
        inside = program.computations.get(called(instruction, "calls"), [])
        return next((found for each in inside if (found := collective_in(program, each))), None)
    return None


def sent_bytes(program: Program, collective: Instruction, num_cores: int) -> float:
    """Bytes that a device sends over its links.

    Args:
        program: that it is of.
        collective: from `collective_in`.
        num_cores: of the run, which take part where the instruction names no groups.
    """
    kind = collective.opcode.removesuffix("-start")
    operands = sum(num_bytes(program.shapes.get(name, "")) for name in collective.operands)
    if kind == "collective-permute":
        return 2.0 * operands  # over one link of the two
    group = _GROUP.search(collective.text)
    size = num_cores
    if group:
        size = len(group.group(1).split(",")) if group.group(1) else int(group.group(2))
    whole = operands * size if kind == "all-gather" else operands
    return (2 if kind == "all-reduce" else 1) * whole * (size - 1) / size


def ring_gb_s(chip: Chip) -> float:
    """Bandwidth of the two links that a ring has of a device, in one direction each, in 10^9 bytes.

    A slice that wraps around in several dimensions could use more of them at once; the prediction does not.
    """
    return 2 * chip.ici_gb_s / _LINKS.get(chip.name, 4)
