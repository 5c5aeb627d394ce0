"""Reading a compiled program: loops by their trips, estimates where there are some, bytes elsewhere."""

import pytest

from xla_b2t.memory.compiled_program import by_source, costs, flops, num_bytes, parse

NOTES = 'metadata={op_name="a" source_file="model.py" source_line=7}, backend_config={"estimated_cycles":"100"}'
PROGRAM = """HloModule step

%body.1 (p.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %one = s32[] constant(1)
  %next = s32[]{:S(1)} add(%i.1, %one), backend_config={"estimated_cycles":"0"}
  %x.1 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %work.1 = f32[8,128]{1,0:T(8,128)} fusion(%x.1), kind=kLoop, calls=%c.1, %NOTES%
  ROOT %t.1 = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%next, %work.1)
}

%condition.1 (p.2: (s32[], f32[8,128])) -> pred[] {
  %bound = s32[] constant(5)
  %p.2 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %less = pred[] compare(%i.2, %bound), direction=LT
}

ENTRY %step (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = s32[] constant(0)
  %state = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%start, %a)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%state), condition=%condition.1, body=%body.1
  %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%out), replica_groups={{0,1}}, to_apply=%add
  ROOT %moved = f32[8,128]{0,1:T(8,128)} copy(%sum)
}
""".replace("%NOTES%", NOTES)


def entry(*lines, before=""):
    """A program of one computation with these lines, and what is before it."""
    inside = "\n".join(f"  {line}" for line in lines)
    return parse(f"HloModule one\n\n{before}\nENTRY %one (a: f32[]) -> f32[] {{\n{inside}\n}}\n")


def only_cost(*lines, before=""):
    (cost,) = costs(entry(*lines, before=before), bytes_per_cycle=1)
    return cost


def test_costs_of_a_loop_are_counted_by_its_trips():
    found = {cost.instruction.name: cost for cost in costs(parse(PROGRAM), bytes_per_cycle=64)}
    assert (found["work.1"].times, found["work.1"].cycles, found["work.1"].loops) == (5, 500, ("loop",))
    assert found["work.1"].kind == "compiler"


def test_costs_without_an_estimate_follow_from_bytes_and_collectives_are_named():
    found = {cost.instruction.name: cost for cost in costs(parse(PROGRAM), bytes_per_cycle=64)}
    assert (found["moved"].kind, found["moved"].cycles) == ("bytes", 2 * 8 * 128 * 4 / 64)
    assert (found["sum"].kind, found["sum"].cycles) == ("collective", 0)
    assert set(found) == {"next", "work.1", "moved", "sum"}


def test_costs_by_source_add_up_the_lines_of_the_model():
    assert by_source(costs(parse(PROGRAM), bytes_per_cycle=64))[0] == ("model.py:7", 500)


STACK = ["%a = f32[9,8,128]{2,1,0:T(8,128)} parameter(0)", "%i = s32[] constant(3)", "%o = s32[] constant(0)"]
ROW_BYTES = 8 * 128 * 4


@pytest.mark.parametrize(
    ("lines", "moved"),
    [
        (["%x = f32[1,8,128]{2,1,0} dynamic-slice(%a, %i, %o, %o), dynamic_slice_sizes={1,8,128}"], 2),
        (["%x = f32[1,8,128]{2,1,0:S(1)} dynamic-slice(%a, %i, %o, %o), dynamic_slice_sizes={1,8,128}"], 1),
        (["%x = f32[1,8,128]{2,1,0} slice(%a), slice={[3:4], [0:8], [0:128]}"], 2),
        (
            [
                "%u = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)",
                "%x = f32[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%a, %u, %i, %o, %o)",
            ],
            2,
        ),
        (
            [
                "%u = f32[1,8,128]{2,1,0:T(8,128)S(1)} parameter(1)",
                "%x = f32[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%a, %u, %i, %o, %o)",
            ],
            1,
        ),
    ],
)
def test_costs_of_a_slice_of_a_stack_are_those_of_the_slice(lines, moved):
    assert only_cost(*STACK, *lines).cycles == moved * ROW_BYTES


BRANCHES = "".join(
    f"%{name} (p: f32[8,128]) -> f32[8,128] {{\n  %p.{name} = f32[8,128]{{1,0}} parameter(0)\n"
    f'  ROOT %work.{name} = f32[8,128]{{1,0}} fusion(%p.{name}), calls=%c, {{"estimated_cycles":"{cycles}"}}\n}}\n'
    for name, cycles in (("cheap", 10), ("dear", 30), ("middling", 20))
)


@pytest.mark.parametrize(
    "named",
    ["branch_computations={%cheap, %dear, %middling}", "true_computation=%dear, false_computation=%cheap"],
)
def test_costs_of_a_conditional_are_those_of_its_costliest_branch(named):
    lines = ["%a = f32[8,128]{1,0} parameter(0)", "%k = s32[] parameter(1)"]
    cost = only_cost(*lines, f"ROOT %x = f32[8,128]{{1,0}} conditional(%k, %a, %a, %a), {named}", before=BRANCHES)
    assert (cost.instruction.name, cost.cycles) == ("work.dear", 30)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[2,3]{1,0:T(8,128)}", 12),
        ("(f32[4]{0}, pred[5]{0:T(8,128)S(1)}, s8[6]{0})", 22),
        ("f32[]", 4),
        ("f8e4m3fn[3,5]{1,0:T(8,128)(4,1)}", 15),
        ("s4[3,5]{1,0}", 8),
        ("(c64[2]{0}, token[], /*index=2*/f8e5m2[<=7]{0})", 23),
    ],
)
def test_num_bytes_counts_every_type_of_element_and_leaves_out_what_stays_on_the_chip(shape, expected):
    assert num_bytes(shape) == expected


def test_num_bytes_of_an_unknown_type_raise():
    with pytest.raises(ValueError, match="the elements posit are of a size that is not known"):
        num_bytes("posit[4]{0}")


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


@pytest.mark.parametrize(
    ("computations", "line", "expected"),
    [
        (MATMUL, "fusion(%a), kind=kOutput, calls=%fused.1", 2 * 512 * 256 * 384),
        (BATCHED, "fusion(%a), kind=kOutput, calls=%fused.2", 2 * 6 * 128 * 256 * 384),
        (MATMUL + NESTED, "fusion(%a), kind=kOutput, calls=%fused.3", 2 * 512 * 256 * 384),
        (WINDOW, "fusion(%a), kind=kOutput, calls=%fused.4", 2 * 10 * 3 * 31),
        (
            "",
            'custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
            '{"cost_estimate":{"flops":"31457280","transcendentals":"61440","bytes_accessed":"729088"}}}',
            31457280,
        ),
        ("", 'fusion(%a), kind=kLoop, calls=%c.5, backend_config={"estimated_cycles":"9"}', 0),
    ],
    ids=["matmul", "batched", "nested", "window", "kernel", "no matmul"],
)
def test_flops_are_two_for_every_product(computations, line, expected):
    nothing = "%c.5 (p: f32[8]) -> f32[8] {\n  ROOT %p.5 = f32[8]{0} parameter(0)\n}\n"
    program = entry("%a = f32[8]{0} parameter(0)", f"ROOT %x = f32[8]{{0}} {line}", before=computations + nothing)
    assert flops(program, costs(program, bytes_per_cycle=1)) == expected


def test_flops_of_a_matmul_that_stands_alone_are_counted_too():
    product = "ROOT %c = bf16[512,384]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    program = entry("%a = bf16[512,256]{1,0} parameter(0)", "%b = bf16[256,384]{1,0} parameter(1)", product)
    assert flops(program, costs(program, bytes_per_cycle=1)) == 2 * 512 * 256 * 384


def test_flops_in_a_loop_count_once_a_trip():
    program = parse(MATMUL + PROGRAM.replace("calls=%c.1", "calls=%fused.1"))
    assert flops(program, costs(program, bytes_per_cycle=1)) == 5 * 2 * 512 * 256 * 384
