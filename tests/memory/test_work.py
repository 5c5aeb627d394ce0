"""What operations do: products, bytes through HBM, vector work, each counted by hand."""

import pytest

from xla_b2t.memory.compiled_program import parse
from xla_b2t.memory.work import work_of

ROW_BYTES = 8 * 128 * 4


def work(*lines, before=""):
    """Of the last line of a program of these."""
    inside = "\n".join(f"  {line}" for line in lines)
    program = parse(f"HloModule one\n\n{before}\nENTRY %one (a: f32[]) -> f32[] {{\n{inside}\n}}\n")
    return work_of(program, program.computations["one"][-1])


# As the compiler writes them: a matmul is a convolution, and the batch of a batched one a spatial axis.
MATMUL = """%fused.1 (p: bf16[512,256], q: bf16[256,384]) -> bf16[512,384] {
  %p.1 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[256,384]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %product.1 = bf16[512,384]{1,0:T(8,128)(2,1)} convolution(%p.1, %q.1), dim_labels=bf_io->bf
}
"""
BATCHED = """%fused.2 (p: bf16[6,128,256], q: bf16[6,256,384]) -> bf16[6,128,384] {
  %p.2 = bf16[6,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %q.2 = bf16[6,256,384]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %product.2 = bf16[6,128,384]{2,1,0} convolution(%p.2, %q.2), window={size=6 stride=5 lhs_dilate=6}, %LABELS%
}
""".replace("%LABELS%", "dim_labels=0bf_0io->0bf")
NESTED = """%fused.3 (p: bf16[512,256], q: bf16[256,384]) -> bf16[512,384] {
  %p.3 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %q.3 = bf16[256,384]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %product.3 = bf16[512,384]{1,0:T(8,128)(2,1)} fusion(%p.3, %q.3), kind=kOutput, calls=%fused.1
}
"""
# The sum of 31 values in a window, as a cumulative sum is: two spatial axes, one of them as wide as its window.
WINDOW = """%fused.4 (p: f32[1,40,3,1], q: f32[31,1,1,1]) -> f32[1,10,3,1] {
  %p.4 = f32[1,40,3,1]{3,2,1,0} parameter(0)
  %q.4 = f32[31,1,1,1]{3,2,1,0} parameter(1)
  ROOT %product.4 = f32[1,10,3,1]{3,2,1,0} convolution(%p.4, %q.4), window={size=31x1}, dim_labels=b01f_01io->b01f
}
"""


A, B = "%a = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)", "%b = bf16[256,384]{1,0:T(8,128)(2,1)} parameter(1)"


@pytest.mark.parametrize(
    ("computations", "line", "expected"),
    [
        (MATMUL, "fusion(%a, %b), kind=kOutput, calls=%fused.1", 2 * 512 * 256 * 384),
        (BATCHED, "fusion(%a, %b), kind=kOutput, calls=%fused.2", 2 * 6 * 128 * 256 * 384),
        (MATMUL + NESTED, "fusion(%a, %b), kind=kOutput, calls=%fused.3", 2 * 512 * 256 * 384),
        (WINDOW, "fusion(%a, %b), kind=kOutput, calls=%fused.4", 2 * 10 * 3 * 31),
        ("", "convolution(%a, %b), dim_labels=bf_io->bf", 2 * 512 * 256 * 384),
        (
            "",
            'custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
            '{"cost_estimate":{"flops":"31457280","transcendentals":"61440","bytes_accessed":"729088"}}}',
            31457280,
        ),
        ("", "add(%a, %a)", 0),
    ],
    ids=["matmul", "batched", "nested", "window", "alone", "kernel", "no matmul"],
)
def test_flops_are_two_for_every_product(computations, line, expected):
    shape = "bf16[512,384]{1,0:T(8,128)(2,1)}"
    assert work(A, B, f"ROOT %x = {shape} {line}", before=computations).flops == expected


@pytest.mark.parametrize(
    ("rows", "summed", "columns", "filled"),
    [
        (512, 256, 384, 512 * 256 * 384),
        (64, 256, 512, 128 * 256 * 512),
        (512, 256, 64, 512 * 256 * 128),
        (8, 200, 512, 128 * 256 * 512),
        (8, 128, 8, 128 * 128 * 32),
    ],
)
def test_matrix_flops_count_the_tiles_that_are_not_full(rows, summed, columns, filled):
    a, b = f"%a = bf16[{rows},{summed}]{{1,0}} parameter(0)", f"%b = bf16[{summed},{columns}]{{1,0}} parameter(1)"
    found = work(a, b, f"ROOT %x = bf16[{rows},{columns}]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf")
    assert found.matrix_flops == pytest.approx(2 * filled)


STACK = ["%a = f32[9,8,128]{2,1,0:T(8,128)} parameter(0)", "%i = s32[]{:S(6)} constant(3)"]


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (["%x = f32[1,8,128]{2,1,0} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={1,8,128}"], 2),
        (["%x = f32[1,8,128]{2,1,0:S(1)} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={1,8,128}"], 1),
        (["%x = f32[1,8,128]{2,1,0} slice(%a), slice={[3:4], [0:8], [0:128]}"], 2),
        (
            [
                "%u = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)",
                "%x = f32[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%a, %u, %i, %i, %i)",
            ],
            2,
        ),
        (
            [
                "%u = f32[1,8,128]{2,1,0:T(8,128)S(1)} parameter(1)",
                "%x = f32[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%a, %u, %i, %i, %i)",
            ],
            1,
        ),
        (["%x = f32[9,8,128]{2,1,0:T(8,128)} add(%a, %a)"], 27),
        (["%x = f32[9,8,128]{2,1,0:T(8,128)S(1)} negate(%a)"], 9),
    ],
)
def test_hbm_bytes_of_a_slice_of_a_stack_are_those_of_the_slice(lines, rows):
    assert work(*STACK, *lines).hbm_bytes == rows * ROW_BYTES


# A row is read from one stack, added to a value on the chip, and written into the other.
TURN = """%renamed (p.3: f32[9,8,128]) -> f32[9,1024] {
  %p.3 = f32[9,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %b.3 = f32[9,1024]{1,0:T(8,128)} bitcast(%p.3)
}
%turn (p: f32[9,8,128], q: f32[9,8,128], r: f32[1,8,128], i: s32[]) -> f32[9,8,128] {
  %p.1 = f32[9,8,128]{2,1,0:T(8,128)} parameter(0)
  %q.1 = f32[9,8,128]{2,1,0:T(8,128)} parameter(1)
  %r.1 = f32[1,8,128]{2,1,0:T(8,128)S(1)} parameter(2)
  %i.1 = s32[]{:S(6)} parameter(3)
  %flat.1 = f32[9,1024]{1,0:T(8,128)} fusion(%p.1), kind=kLoop, calls=%renamed
  %row.1 = f32[1,1024]{1,0:T(1,128)} dynamic-slice(%flat.1, %i.1, %i.1), dynamic_slice_sizes={1,1024}
  %back.1 = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%row.1)
  %sum.1 = f32[1,8,128]{2,1,0:T(8,128)} add(%back.1, %r.1)
  ROOT %t.1 = f32[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%q.1, %sum.1, %i.1, %i.1, %i.1)
}
"""
TURN_LINES = [
    *STACK,
    "%q = f32[9,8,128]{2,1,0:T(8,128)} parameter(1)",
    "%r = f32[1,8,128]{2,1,0:T(8,128)S(1)} parameter(2)",
    "ROOT %x = f32[9,8,128]{2,1,0:T(8,128)} fusion(%a, %q, %r, %i), kind=kLoop, calls=%turn",
]


def test_hbm_bytes_of_a_fusion_are_the_parts_that_it_reads_and_updates():
    assert work(*TURN_LINES, before=TURN).hbm_bytes == 2 * ROW_BYTES


def test_vector_work_of_a_fusion_is_that_of_the_part_that_it_updates():
    """A row is cut out (4), added to (1), put in place (4) and stored (2)."""
    assert work(*TURN_LINES, before=TURN).vector_elements == (4 + 1 + 4 + 2) * 8 * 128


def test_hbm_bytes_of_a_fusion_that_reads_all_of_a_stack_besides_are_of_the_whole():
    whole = TURN.replace("add(%back.1, %r.1)", "add(%back.1, %p.1)")
    assert work(*TURN_LINES, before=whole).hbm_bytes == (9 + 1) * ROW_BYTES


def test_hbm_bytes_of_a_kernel_are_its_arrays_in_hbm_and_what_it_reads_again():
    call = (
        'ROOT %x = f32[9,8,128]{2,1,0:T(8,128)S(1)} custom-call(%a), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"cost_estimate":{"flops":"10","bytes_accessed":"%ACCESSED%"}}}'
    )
    once = work(*STACK, call.replace("%ACCESSED%", str(18 * ROW_BYTES)))
    again = work(*STACK, call.replace("%ACCESSED%", str(27 * ROW_BYTES)))
    assert (once.hbm_bytes, again.hbm_bytes) == (9 * ROW_BYTES, 18 * ROW_BYTES)


def elementwise(line, of="f32[8,128]{1,0:T(8,128)}"):
    """Vector work of a fusion of one operation on %p.9 and %q.9."""
    inside = (
        f"%fused.9 (p: f32[8,128], q: f32[8,128]) -> f32[8,128] {{\n  %p.9 = {of} parameter(0)\n"
        f"  %q.9 = {of} parameter(1)\n  ROOT %r.9 = {line}\n}}\n"
    )
    lines = [f"%a = {of} parameter(0)", f"%b = {of} parameter(1)"]
    return work(*lines, f"ROOT %x = {of} fusion(%a, %b), kind=kLoop, calls=%fused.9", before=inside).vector_elements


@pytest.mark.parametrize(
    ("line", "instructions"),
    [
        ("f32[8,128]{1,0:T(8,128)} add(%p.9, %q.9)", 1 + 2),
        ("f32[8,128]{1,0:T(8,128)} tanh(%p.9)", 20 + 2),
        ("f32[8,128]{1,0:T(8,128)} sine(%p.9)", 60 + 2),
        ("f32[8,128]{1,0:T(8,128)} copy(%p.9)", 1 + 2),
        ("f32[8,1,128]{2,1,0} reshape(%p.9)", 4 + 2),
        ("f32[8]{0} reduce(%p.9, %q.9), dimensions={1}", 2 + 2 / 128),
        ("f32[8,128]{0,1:T(8,128)} copy(%p.9)", None),
        ("f32[1024]{0} reshape(%p.9)", None),
        ("f32[8,128]{1,0} sort(%p.9)", None),
        ("f32[8,128]{1,0} an-opcode-of-next-year(%p.9)", None),
    ],
)
def test_vector_work_is_counted_where_all_is_elementwise(line, instructions):
    assert elementwise(line) == (None if instructions is None else instructions * 8 * 128)


def test_vector_work_in_front_of_a_matmul_is_not_counted():
    """It is done again for every window."""
    in_front = MATMUL.replace("convolution(%p.1", "convolution(%n.1").replace(
        "  ROOT", "  %n.1 = bf16[512,256]{1,0:T(8,128)(2,1)} negate(%p.1)\n  ROOT"
    )
    line = "ROOT %x = bf16[512,384]{1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kOutput, calls=%fused.1"
    assert work(A, B, line, before=in_front).vector_elements is None
    assert work(A, B, line, before=MATMUL).vector_elements == 2 * 512 * 384
    exact = MATMUL.replace("dim_labels", "operand_precision={highest,highest}, dim_labels")
    assert work(A, B, line, before=exact).vector_elements is None
