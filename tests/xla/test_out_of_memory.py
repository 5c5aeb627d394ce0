"""What ran out, by the texts that TPUs, their compiler and hosts write."""

import numpy as np
import pytest

from xla_b2t.errors import UserError
from xla_b2t.xla.out_of_memory import Memory, exhausted, in_short, not_cured

HBM = {
    "compile": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used "
    "15.87G "
    "of 15.75G hbm. Exceeded hbm capacity by 120.50M.\n\nTotal hbm usage >= 16.12G:\n    reserved 258.00M\n    "
    "scoped vmem "
    "17.43M\n  Largest program allocations in hbm:\n  1. Size: 7.60G\n     Shape: bf16[247,7168,2304]",
    "compile, by its code": "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: required HBM: 19.12 GiB, available 15.75 "
    "GiB",
    "compile, one allocation": "RESOURCE_EXHAUSTED: Allocation (size=20346568704) would exceed memory "
    "(size=17179869184) "
    ":: #allocation7 [shape = 'bf16[616,7168,2304]{2,1,0:T(8,128)(2,1)}', space=hbm, size = 0x4bcc00000]",
    "compile, two kinds of core": "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage "
    "174.10G, "
    "exceeding available bytes: 95.74G",
    "compile, as torch_xla says it": "Bad StatusOr access: RESOURCE_EXHAUSTED: Ran out of memory in memory space "
    "hbm. Used "
    "9.08G of 7.48G hbm.",
    "loading": "RESOURCE_EXHAUSTED: Error loading program 'step': Attempting to reserve 29.49G at the bottom of "
    "memory. "
    "That was not possible. There are 147.64M free, 0B reserved, and 147.64M reservable.",
    "loading, by its code": "RESOURCE_EXHAUSTED: E0101: RuntimeProgramAllocationFailure: 29.33G of 29.30G",
    "running": "RESOURCE_EXHAUSTED: Attempting to allocate 180.59M. That was not possible. There are 142.58M free.; "
    "(0x3x0_HBM1)",
    "running, in old words": "Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve "
    "3.95G at "
    "the bottom of memory. That was not possible. There are 1.92G free.\nHBM capacity 8.00G",
    "feeding": "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00M. That was not "
    "possible. "
    "There are 6.43M free.; (0x0x1_HBM0)",
}
ON_CHIP = {
    "vmem": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used "
    "32.42M of "
    "16.00M vmem. Exceeded vmem capacity by 16.42M",
    "a kernel": "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %gru = "
    "bf16[2048,4096] custom-call(...). Scoped allocation with size 31.07M and limit 16.00M exceeded scoped vmem "
    "limit.",
    "a kernel, by its code": "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: scoped allocation of 18.00M",
    "beside hbm": "RESOURCE_EXHAUSTED: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem, program in "
    "hbm "
    "(0x0x0_HBM0)",
    "sflag": "RESOURCE_EXHAUSTED: Ran out of memory in memory space sflag. Used 2.1K of 2.0K sflag.",
    "in other words": "RESOURCE_EXHAUSTED: the kernel wants 70000 words of smem",
    "smem": "Resource exhausted: Ran out of memory in memory space smem. Used 1.00M of 1.00M smem.",
    "one allocation": "RESOURCE_EXHAUSTED: Allocation (size=134217728) would exceed memory (size=16777216) :: "
    "[space=vmem]",
}
HOST = {
    "C++": "std::bad_alloc",
    "torch": "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 8 B",
    "XLA on a CPU": "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.",
}
ELSE = {
    "a quota": "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Requests' of service 'tpu.googleapis.com'",
    "a message too long": "RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)",
    "shapes": "INVALID_ARGUMENT: Call parameter must match argument; got f32[64,7168] and bf16[64,7168]",
    "a word": "the HBM of this core is fine",
    "files": "Attempting to reserve a port. That was not possible.",
    "nothing": "",
}
LONG = " ".join(["while allocating on stack"] * 12)
TEXTS = [
    pytest.param(text, memory, id=f"{memory.value if memory else 'else'}: {name}")
    for memory, texts in ((Memory.HBM, HBM), (Memory.ON_CHIP, ON_CHIP), (Memory.HOST, HOST), (None, ELSE))
    for name, text in texts.items()
]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize(("text", "memory"), TEXTS)
def test_text_of_an_error_tells_which_memory_ran_out(text, memory, kind):
    assert exhausted(kind(text)) is memory


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), Memory.HOST),
        (np.exceptions.AxisError("hbm"), None),
        (OSError(12, "Cannot allocate memory"), Memory.HOST),
        (OSError(28, "No space left on device"), None),
        (KeyError(HBM["compile"]), None),
        (UserError(HBM["compile"], "told", "before"), None),
    ],
)
def test_kind_of_an_error_tells_too(error, memory):
    assert exhausted(error) is memory


def test_error_in_short_is_the_sentence_with_the_numbers():
    assert in_short(RuntimeError(HBM["compile"])).startswith(
        "Ran out of memory in memory space hbm. Used 15.87G of 15.75G"
    )
    assert in_short(RuntimeError(HBM["feeding"])) == HBM["feeding"].partition(": ")[2]
    assert len(in_short(RuntimeError(HBM["compile"]))) <= 204
    assert in_short(MemoryError()) == "MemoryError"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (ON_CHIP["a kernel"].replace("custom-call", LONG), "with size 31.07M and limit 16.00M"),
        (
            f"Ran out of memory in memory space hbm {LONG}. Used 15.87G of 15.75G hbm. {LONG}",
            "Used 15.87G of 15.75G hbm",
        ),
        (f"Attempting to reserve 3.95G at {LONG}. There are 1.92G free. {LONG}", "There are 1.92G free"),
    ],
)
def test_error_in_short_keeps_the_numbers_behind_a_long_sentence(text, numbers):
    found = in_short(RuntimeError("RESOURCE_EXHAUSTED: " + text))
    assert found.startswith(("Ran out of memory in memory space", "Attempting to reserve 3.95G"))
    assert found.endswith(f" ... {numbers}")
    assert len(found) <= 205


def test_vmem_error_says_that_a_smaller_batch_is_no_cure():
    error = not_cured(RuntimeError(ON_CHIP["vmem"]), Memory.ON_CHIP, "step 3")
    assert "a smaller batch does not cure: Ran out of memory in memory space vmem. Used 32.42M" in error.what
    assert error.where == "step 3"
    assert "model.options.kernel=false" in error.fix and "scoped_vmem_limit_kib" in error.fix


def test_host_error_names_what_takes_host_memory():
    error = not_cured(MemoryError(), Memory.HOST, "step 3")
    assert "host memory, which a smaller batch on the core does not cure: MemoryError" in error.what
    assert error.where == "step 3"
    assert "fewer --cores" in error.fix and "data.prefetch_mb" in error.fix
