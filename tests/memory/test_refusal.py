"""The compiler's words when a program does not fit: recorded ones, shortened."""

from xla_b2t.memory.allocations import Allocation
from xla_b2t.memory.refusal import Refusal, explained, read
from xla_b2t.xla.verdict import Verdict

LISTED = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 16.00G of 15.75G hbm. Exceeded hbm capacity by 255.30M.

Total hbm usage >= 16.25G:
    reserved        258.00M\x20
    program          16.00G\x20
    arguments            0B\x20

Output size 0B; shares 0B with arguments.

Program hbm requirement 16.00G:
    global            64.5K
    HLO temp         16.00G (100.0% utilization: Unpadded (8.87G) Padded (8.87G), 44.6% fragmentation (7.13G))

  Largest program allocations in hbm:

  1. Size: 7.60G
     Shape: bf16[247,7168,2304]{1,2,0:T(8,128)(2,1)}
     Unpadded size: 7.60G
     XLA label: broadcast.2025 = broadcast(constant.1981), dimensions={}
     Allocation type: HLO temp
     ==========================

  2. Size: 64.50M
     Operator: op_name="aten__matmul" source_file="my_model.py" source_line=47 source_end_line=47
     Shape: bf16[64,1000,512]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 62.50M
     XLA label: fusion.285 = fusion(copy.908, copy.915, fusion.2, ...(+2)), kind=kOutput, calls=fused_computation.425
     Allocation type: HLO temp
     ==========================

  3. Size: 512B
     Shape: (bf16[2304]{0:T(1024)(128)(2,1)}, u32[]{:S(2)})
     Unpadded size: 512B
     XLA label: copy-start.8 = copy-start(Arg_1.2)
     Allocation type: HLO temp
     ==========================

"""
SINGLE = """RESOURCE_EXHAUSTED: Allocation (size=20346568704) would exceed memory (size=17179869184) :: #allocation670 \
[shape = 'bf16[616,7168,2304]{1,2,0:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of \
broadcast.2022@{}'] :: <no-hlo-instruction>"""
ON_CHIP = """RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem. Exceeded vmem \
capacity by 4.00M."""
WORDS = "Ran out of memory in memory space hbm. Used 16.00G of 15.75G hbm. Exceeded hbm capacity by 255.30M."
STACK = "bf16[247,7168,2304]{1,2,0:T(8,128)(2,1)}"


def test_read_of_a_refusal_with_a_list_gives_need_limit_and_every_allocation():
    mib = 2**20
    assert read(LISTED) == Refusal(
        "hbm",
        16 * 2**30,
        int(15.75 * 2**30),
        (
            Allocation(round(7.6 * 2**30), round(7.6 * 2**30), STACK, "broadcast.2025", ""),
            Allocation(
                int(64.5 * mib),
                int(62.5 * mib),
                "bf16[64,1000,512]{2,1,0:T(8,128)(2,1)}",
                "aten__matmul",
                "my_model.py:47",
            ),
            Allocation(512, 512, "(bf16[2304]{0:T(1024)(128)(2,1)}, u32[]{:S(2)})", "copy-start.8", ""),
        ),
        WORDS,
    )


def test_read_of_a_refusal_for_one_allocation_knows_that_one_and_no_need():
    size = 616 * 7168 * 2304 * 2
    assert read(SINGLE) == Refusal(
        "hbm",
        None,
        2**34,
        (Allocation(size, size, "bf16[616,7168,2304]{1,2,0:T(8,128)(2,1)}", "broadcast.2022", ""),),
        f"Allocation (size={size}) would exceed memory (size=17179869184)",
    )


def test_read_of_a_refusal_for_on_chip_memory_says_so():
    found = read(ON_CHIP)
    assert (found.memory, found.needed_bytes, found.limit_bytes) == ("vmem", 20 * 2**20, 16 * 2**20)
    assert found.largest == ()


def test_read_of_other_words_keeps_them():
    assert read("RESOURCE_EXHAUSTED:  quota of\nsomething") == Refusal(
        "", None, None, (), "RESOURCE_EXHAUSTED: quota of something"
    )


BUFFERS = """\
allocation 0: size 1000, parameter 0, shape |bf16[500]| at ShapeIndex {}:
 value: <0 Arg_0.1 @0> (size=1000,offset=0): bf16[500]{0}
allocation 1: size 8158445600, preallocated-temp:
 value: <1 while.1{2} (phi) @0> (size=8158445568,offset=0): bf16[247,7168,2304]{1,2,0:T(8,128)(2,1)}
    while.1{2}:3-5
"""
TEXT = """\
ENTRY %main (p: bf16[500]) -> bf16[247,7168,2304] {
  %Arg_0.1 = bf16[500]{0} parameter(0)
  ROOT %while.1 = (s32[], bf16[247,7168,2304]) while(%Arg_0.1), condition=%c, body=%b, metadata={op_name="xla__scan" \
source_file="my_model.py" source_line=31}
}
"""


def test_explained_names_the_lines_that_the_words_do_not_know():
    verdict = Verdict(accepted=False, refusal=LISTED, text=TEXT, buffers=BUFFERS)
    found = explained(verdict, {}, num_largest=1)
    assert found.largest == (Allocation(8158445568, 8158445568, STACK, "xla__scan", "my_model.py:31"),)
    assert found.needed_bytes == 8158445600 + 1000
    assert (found.limit_bytes, found.words) == (int(15.75 * 2**30), WORDS)


def test_explained_without_buffers_has_the_words_alone():
    assert explained(Verdict(accepted=False, refusal=SINGLE), {}) == read(SINGLE)


def test_explained_for_on_chip_memory_does_not_count_hbm():
    assert explained(Verdict(accepted=False, refusal=ON_CHIP, text=TEXT, buffers=BUFFERS), {}) == read(ON_CHIP)
