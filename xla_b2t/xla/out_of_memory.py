"""Which memory ran out, told from an error's text.

In: an error that tracing, compiling or running raised. Out: the memory, or None where it is anything else. torch_xla
hands on what the TPU's compiler and runtime wrote, as a `RuntimeError` or a `ValueError`, so that the text is all there
is.

Source: https://openxla.org/xla/errors (E0100, E0101, E1000, E1001, E1002), the refusals of libtpu 0.0.21, and the texts
in pytorch/xla issues 1735, 2569, 2628, 3470, 6611, 7962 and 9524.
"""

import re
from enum import Enum

from xla_b2t.errors import UserError


class Memory(Enum):
    """What can run out."""

    HBM = "HBM"
    """A core's large memory: less of a batch at a time needs less of it."""
    ON_CHIP = "on-chip memory"
    """VMEM or SMEM, where one operation puts its blocks."""
    HOST = "host memory"
    """The machine's own; a CPU rank has no other."""


# A refusal for VMEM can name the HBM that its program lies in, and one for HBM lists what its operations take of VMEM.
# So the sentences that say what ran out come first, and single words only decide where there is none.
_SAYS = (
    (Memory.HBM, r"Ran out of memory in memory space hbm|CompileTimeHbmOom"),
    (Memory.ON_CHIP, r"Ran out of memory in memory space ([vsc]mem|sflag)|ScopedVmemOom|exceeded scoped vmem limit"),
    (Memory.HBM, r"would exceed memory \(size=\d+\)[\s\S]*space=hbm"),
    (Memory.ON_CHIP, r"would exceed memory \(size=\d+\)[\s\S]*space=(vmem|smem)"),
    (Memory.HBM, r"Hbm usage[\s\S]*exceeding available bytes"),
    (Memory.HBM, r"Error allocating device buffer|Runtime(Buffer|Program)AllocationFailure"),
    (Memory.HBM, r"Attempting to (reserve|allocate) [\d.]+[KMGT]?[\s\S]{0,40}That was not possible"),
    (Memory.HOST, r"std::bad_alloc|CPUAllocator|Cannot allocate memory|Out of memory allocating \d+ bytes"),
    (Memory.HBM, r"(RESOURCE_EXHAUSTED|Resource exhausted)[\s\S]*\bhbm"),
    (Memory.ON_CHIP, r"(RESOURCE_EXHAUSTED|Resource exhausted)[\s\S]*\b[vsc]mem\b"),
)


def exhausted(error: BaseException) -> Memory | None:
    """The memory that ran out; None for every other error, also where something else ran out, such as a quota."""
    if isinstance(error, MemoryError):
        return Memory.HOST
    if isinstance(error, RuntimeError | ValueError | OSError):
        return exhausted_by(str(error))
    return None


def exhausted_by(text: str) -> Memory | None:
    """The same of a text."""
    for memory, pattern in _SAYS:
        if re.search(pattern, text, re.IGNORECASE):
            return memory
    return None


def in_short(error: BaseException) -> str:
    """The sentence of an error that has its numbers, for a message of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    match = re.search(
        r"(Ran out of memory in|Attempting to|Allocation \(size|TPU TensorCore Hbm|Error allocating)", text
    )
    text = text[match.start() :] if match else text
    if len(text) <= _SHORT:
        return text
    start, numbers = text[:_SHORT].rsplit(" ", 1)[0], _NUMBERS.search(text)
    if numbers is None or numbers.end() <= len(start):
        return start + " ..."
    return f"{text[: _SHORT - len(numbers[0])].rsplit(' ', 1)[0]} ... {numbers[0]}"


_SHORT = 200
_NUMBERS = re.compile(
    r"Used [\d.]+\w? of [\d.]+\w?( \w+)?|with size [\d.]+\w? and limit [\d.]+\w?|There are [\d.]+\w? free"
    r"|exceeding available bytes: [\d.]+\w?|\(size=\d+\) would exceed memory \(size=\d+\)"
)
"""What was needed and what there is."""


def not_cured(error: BaseException, memory: Memory, doing: str) -> UserError:
    """What to tell where a smaller batch is no way out.

    Args:
        error: as raised.
        memory: what ran out; not HBM.
        doing: what was being done.
    """
    if memory is Memory.ON_CHIP:
        return UserError(
            "the core's on-chip memory (VMEM, SMEM) is too small for an operation, which a smaller batch does not "
            f"cure: {in_short(error)}",
            doing,
            "if it is a custom-call, a kernel, set model.options.kernel=false (evaluate: --no-kernel), or give a "
            "kernel "
            "of your own smaller blocks; else set LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536, or write "
            "the "
            "operation in another way",
        )
    return UserError(
        f"the machine ran out of host memory, which a smaller batch on the core does not cure: {in_short(error)}",
        doing,
        "use fewer --cores, lower data.prefetch_mb, or end what else runs on this machine",
    )
