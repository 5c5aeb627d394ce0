"""What the TPU's compiler means when it refuses a program for its memory.

In: a refused `Verdict`, or the words alone. Out: a `Refusal`. There are two kinds of words, one with a list of the
largest allocations and one that names the first that is too large for any core. Where the compiler came as far as to
place the program's values, its refusal is explained by those (`allocations.py`): its own list is of another moment than
the fullest, and seldom has a line.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_b2t.memory.allocations import Allocation, unpadded_bytes, usage
from xla_b2t.xla.frames import shown

if TYPE_CHECKING:
    from xla_b2t.training.traced import Parameter
    from xla_b2t.xla.verdict import Verdict

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT]?)"
_USED = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {_SIZE} of {_SIZE} \w+[^\n]*")
_SINGLE = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
_SHAPE = re.compile(r"shape = '([^']*)', space=(\w+)")
_TAG = re.compile(r"tag = '(?:output of )?([^@']*)")
_ITEM = re.compile(rf"^ +\d+\. Size: {_SIZE}$", re.MULTILINE)
_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LABEL = re.compile(r"XLA label: (.+)")


@dataclass(frozen=True)
class Refusal:
    """Why a program was refused.

    Attributes:
        memory: that is too small: "hbm", or on-chip "vmem" or "smem", which a smaller batch does not always cure; ""
            where there are no words, or they are not understood.
        needed_bytes: of that memory; None where only the first allocation that is too large is known.
        limit_bytes: what the compiler compared it with; None where the words are not understood.
        largest: allocations, the largest first.
        words: the compiler's, the sentence that says it.
    """

    memory: str
    needed_bytes: int | None
    limit_bytes: int | None
    largest: tuple[Allocation, ...]
    words: str


def explained(verdict: "Verdict", parameters: Mapping[int, "Parameter"], num_largest: int = 10) -> Refusal:
    """Why a program was refused, as exactly as the verdict tells.

    Args:
        verdict: refused; or accepted and too large all the same, of which the compiler has no words.
        parameters: what the program's parameters are, by number, as of `allocations.usage`.
        num_largest: how many allocations to name.
    """
    said = read(verdict.refusal)
    if said.memory not in ("hbm", "") or not verdict.buffers:
        return said
    found = usage(verdict, parameters, num_largest)
    return Refusal(said.memory, found.needed_bytes, said.limit_bytes, found.largest, said.words)


def read(text: str) -> Refusal:
    """What the words alone say; sizes in them are rounded to a hundredth of their unit."""
    if used := _USED.search(text):
        memory, needed, needed_unit, limit, limit_unit = used.groups()
        largest = tuple(_listed(text))
        return Refusal(memory, _bytes(needed, needed_unit), _bytes(limit, limit_unit), largest, used[0])
    if single := _SINGLE.search(text):
        shape, tag = _SHAPE.search(text), _TAG.search(text)
        what = tag[1] if tag else "one allocation"
        one = Allocation(int(single[1]), unpadded_bytes(shape[1]) if shape else 0, shape[1] if shape else "", what, "")
        return Refusal(shape[2] if shape else "hbm", None, int(single[2]), (one,), single[0])
    return Refusal("", None, None, (), " ".join(text.split())[:400])


def _listed(text: str) -> Iterator[Allocation]:
    """Every allocation of the list; the words of each go up to the next."""
    starts = list(_ITEM.finditer(text))
    for index, item in enumerate(starts):
        words = text[item.end() : starts[index + 1].start() if starts[index + 1 :] else None]
        line, name, label = (pattern.search(words) for pattern in (_LINE, _OP_NAME, _LABEL))
        shape = re.search(r"Shape: (.+)", words)
        unpadded = re.search(rf"Unpadded size: {_SIZE}", words)
        size = _bytes(*item.groups())
        yield Allocation(
            size,
            _bytes(*unpadded.groups()) if unpadded else size,
            shape[1] if shape else "",
            name[1] if name else label[1].partition(" = ")[0] if label else "",
            f"{shown(line[1])}:{line[2]}" if line else "",
        )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
