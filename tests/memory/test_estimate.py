"""HBM by arithmetic, on programs that are counted by hand. f32[64,128] takes 32 KiB, without padding."""

import pytest

from xla_b2t.memory.estimate import estimate
from xla_b2t.training.traced import Parameter

KIB = 1024
X = "f32[64,128]{1,0}"
BLOCK = 32 * KIB
NOTE = ', metadata={op_type="a" op_name="a" source_file="/user/model.py" source_line=12}'


def program(*lines, before="", aliases=""):
    inside = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule step{', input_output_alias={ ' + aliases + ' }' if aliases else ''}"
    return f"{header}\n\n{before}\nENTRY %step (a: f32[]) -> f32[] {{\n{inside}\n}}\n"


def step_bytes(*lines, **kwargs):
    """Bytes besides the arguments."""
    found = estimate(program(*lines, **kwargs))
    return found.num_bytes - found.parts.get("inputs", 0)


def test_estimate_of_a_chain_counts_its_end_only():
    assert (
        step_bytes(
            f"%x = {X} parameter(0)",
            f"%a = {X} exponential({X} %x)",
            f"%b = {X} multiply({X} %a, {X} %a)",
            f"ROOT %c = {X} add({X} %b, {X} %x)",
        )
        == BLOCK
    )


def test_estimate_counts_arguments_with_their_padding():
    found = estimate(
        program(
            "%x = f32[9,130]{1,0} parameter(0)",
            "%n = s32[] parameter(1)",
            "ROOT %y = s32[] negate(s32[] %n)",
        )
    )
    assert found.parts["inputs"] == 16 * 256 * 4 + 512
    assert (found.largest[0].bytes, found.largest[0].unpadded_bytes) == (16 * 256 * 4, 9 * 130 * 4)


def test_estimate_of_a_matmul_with_its_bias_counts_one_result():
    lines = (
        f"%x = {X} parameter(0)",
        "%w = f32[128,128]{1,0} parameter(1)",
        "%b = f32[128]{0} parameter(2)",
        f"%dot = {X} dot({X} %x, f32[128,128]{{1,0}} %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        f"%wide = {X} broadcast(f32[128]{{0}} %b), dimensions={{1}}",
        f"%sum = {X} add({X} %dot, {X} %wide)",
    )
    assert step_bytes(*lines, f"ROOT %out = {X} tanh({X} %sum)") == BLOCK
    # Two matmuls do not go into one kernel: one result is written, and the sum into its place.
    second = f"%dot2 = {X} dot({X} %x, f32[128,128]{{1,0}} %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    assert step_bytes(*lines, second, f"ROOT %out = {X} add({X} %sum, {X} %dot2)") == BLOCK
    assert step_bytes(*lines, second, f"ROOT %out = ({X}, {X}) tuple({X} %sum, {X} %dot2)") == 2 * BLOCK


def dot(name, left, right):
    attributes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = {X} dot({X} %{left}, f32[128,128]{{1,0}} %{right}), {attributes}"


FORWARD = (
    f"%x = {X} parameter(0)",
    "%w = f32[128,128]{1,0} parameter(1)",
    dot("h1", "x", "w"),
    f"%t1 = {X} tanh({X} %h1){NOTE}",
    dot("h2", "t1", "w"),
    f"%t2 = {X} tanh({X} %h2)",
    dot("h3", "t2", "w"),
)


def test_estimate_of_a_forward_pass_keeps_two_layers():
    assert step_bytes(*FORWARD, f"ROOT %t3 = {X} tanh({X} %h3)") == 2 * BLOCK


def test_estimate_of_activations_that_are_read_later_keeps_all():
    found = estimate(
        program(
            *FORWARD,
            f"%t3 = {X} tanh({X} %h3)",
            dot("g3", "t3", "w"),
            f"%d2 = {X} multiply({X} %g3, {X} %t2)",
            dot("g2", "d2", "w"),
            f"ROOT %d1 = {X} multiply({X} %g2, {X} %t1)",
        )
    )
    # t1, t2 and t3 while d2 is made.
    assert found.parts["activations"] == 4 * BLOCK
    (t1,) = [held for held in found.largest if held.what == "t1"]
    assert (t1.where, t1.shape, t1.part, t1.bytes) == ("/user/model.py:12", "f32[64,128]", "activations", BLOCK)


def test_estimate_of_cheap_work_on_what_stays_does_it_again():
    """A dropout mask is kept as one byte an element, and what it leaves of an activation is not kept beside that."""
    mask = "pred[64,128]{1,0}"
    lines = (
        *FORWARD[:4],
        "%r = (u64[2]{0}, u32[64,128]{1,0}) rng-bit-generator(u64[2]{0} %seed), algorithm=rng_default",
        "%bits = u32[64,128]{1,0} get-tuple-element((u64[2]{0}, u32[64,128]{1,0}) %r), index=1",
        "%half = u32[64,128]{1,0} broadcast(u32[] %limit), dimensions={}",
        f"%mask = {mask} compare(u32[64,128]{{1,0}} %bits, u32[64,128]{{1,0}} %half), direction=LT",
        f"%zero = {X} broadcast(f32[] %none), dimensions={{}}",
        f"%kept = {X} select({mask} %mask, {X} %t1, {X} %zero)",
        dot("h2", "kept", "w"),
        f"%t2 = {X} tanh({X} %h2)",
        dot("g2", "t2", "w"),
        f"%d1 = {X} select({mask} %mask, {X} %g2, {X} %zero)",
        f"%d2 = {X} multiply({X} %d1, {X} %t1)",
        f"ROOT %d3 = {X} add({X} %d2, {X} %kept)",
    )
    constants = (
        "%seed = u64[2]{0} constant({1, 2})",
        "%limit = u32[] constant(7)",
        "%none = f32[] constant(0)",
    )
    found = estimate(program(*constants, *lines))
    held = {one.what: one.bytes for one in found.largest if one.part == "activations"}
    assert held["mask"] == 64 * 128
    assert "kept" not in held


LOOP = f"""
%body (s: (s32[], {X}, f32[10,64,128])) -> (s32[], {X}, f32[10,64,128]) {{
  %s = (s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element((s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]{{1,0}}) %s), index=0
  %h = {X} get-tuple-element((s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]{{1,0}}) %s), index=1
  %all = f32[10,64,128]{{2,1,0}} get-tuple-element((s32[], {X}, f32[10,64,128], f32[128,128]) %s), index=2
  %w = f32[128,128]{{1,0}} get-tuple-element((s32[], {X}, f32[10,64,128], f32[128,128]) %s), index=3
  %one = s32[] constant(1)
  %next = s32[] add(s32[] %i, s32[] %one)
  {dot("new", "h", "w")}
  %part = f32[1,64,128]{{2,1,0}} reshape({X} %new)
  %zero = s32[] constant(0)
  %more = f32[10,64,128]{{2,1,0}} dynamic-update-slice(f32[10,64,128]{{2,1,0}} %all, f32[1,64,128]{{2,1,0}} %part, s32[] %i, s32[] %zero, s32[] %zero)
  ROOT %t = (s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]{{1,0}}) tuple(s32[] %next, {X} %new, f32[10,64,128]{{2,1,0}} %more, f32[128,128]{{1,0}} %w)
}}
"""  # noqa: E501


def test_estimate_of_a_loop_writes_its_stack_in_place_and_copies_an_argument_that_it_changes():
    step = step_bytes(
        f"%x = {X} parameter(0)",
        "%w = f32[128,128]{1,0} parameter(1)",
        "%start = s32[] constant(0)",
        "%none = f32[] constant(0)",
        "%empty = f32[10,64,128]{2,1,0} broadcast(f32[] %none), dimensions={}",
        f"%state = (s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]) tuple(s32[] %start, {X} %x, f32[10,64,128]{{2,1,0}} %empty, f32[128,128]{{1,0}} %w)",  # noqa: E501
        f"%loop = (s32[], {X}, f32[10,64,128]{{2,1,0}}, f32[128,128]) while((s32[], {X}, f32[10,64,128], f32[128,128]) %state), condition=%c, body=%body",  # noqa: E501
        f"ROOT %out = f32[10,64,128]{{2,1,0}} get-tuple-element((s32[], {X}, f32[10,64,128], f32[128,128]) %loop), index=2",  # noqa: E501
        before=LOOP,
    )
    counters = 512 + 512  # of the step, and the next one within the body
    assert step == 10 * BLOCK + BLOCK + BLOCK + counters


UPDATE = (
    f"%w = {X} parameter(0)",
    f"%x = {X} parameter(1)",
    "%small = f32[64,64]{1,0} parameter(2)",
    f"%g = {X} dot(f32[64,64]{{1,0}} %small, {X} %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{NOTE}",
    f"%square = {X} multiply({X} %g, {X} %g)",
    "%none = f32[] constant(0)",
    f"%norm = f32[] reduce({X} %square, f32[] %none), dimensions={{0,1}}, to_apply=%add",
    f"%scale = {X} broadcast(f32[] %norm), dimensions={{}}",
    f"%step = {X} multiply({X} %g, {X} %scale)",
    f"%new = {X} subtract({X} %w, {X} %step)",
    f"ROOT %out = ({X}, f32[], {X}) tuple({X} %new, f32[] %norm, {X} %g)",
)


def test_estimate_of_a_donated_argument_writes_the_new_value_into_its_place():
    norm = 512
    assert step_bytes(*UPDATE, aliases="{0}: (0, {}, may-alias)") == BLOCK + norm
    assert step_bytes(*UPDATE) == 2 * BLOCK + norm


def test_estimate_tells_what_arguments_are_for_and_finds_gradients():
    parameters = {0: Parameter("master", "layer.weight"), 1: Parameter("input", "features_BTC")}
    text = program(*UPDATE, aliases="{0}: (0, {}, may-alias)")
    found = estimate(text, parameters)
    assert found.parts == {
        "optimizer": BLOCK,
        "inputs": BLOCK + 64 * 128 * 4,  # 64 columns are padded to 128
        "gradients": BLOCK,
        "activations": 512,
    }
    assert found.num_bytes == sum(found.parts.values())
    assert found.with_margin_bytes > found.num_bytes
    named = {held.what: held.part for held in found.largest}
    assert (named["layer.weight"], named["g"]) == ("optimizer", "gradients")
    assert len(estimate(text, parameters, num_largest=2).largest) == 2


def test_estimate_of_a_concatenation_that_a_matmul_reads_counts_it():
    assert (
        step_bytes(
            "%a = f32[64,128]{1,0} parameter(0)",
            "%w = f32[256,128]{1,0} parameter(1)",
            "%both = f32[64,256]{1,0} concatenate(f32[64,128]{1,0} %a, f32[64,128]{1,0} %a), dimensions={1}",
            f"ROOT %out = {X} dot(f32[64,256]{{1,0}} %both, f32[256,128]{{1,0}} %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",  # noqa: E501
        )
        == 3 * BLOCK
    )


def test_estimate_of_something_else_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO program"):
        estimate("")


def test_estimate_of_a_layer_norm_keeps_what_goes_in_and_not_what_comes_out():
    norm = f"({X}, f32[64]{{0}}, f32[64]{{0}})"
    found = estimate(
        program(
            *FORWARD[:3],
            "%one = f32[] constant(1)",
            "%ones = f32[64]{0} broadcast(f32[] %one), dimensions={}",
            f"%n = {norm} batch-norm-training({X} %h1, f32[64]{{0}} %ones, f32[64]{{0}} %ones), epsilon=1",
            f"%normed = {X} get-tuple-element({norm} %n), index=0",
            dot("h2", "normed", "w"),
            f"%t2 = {X} tanh({X} %h2)",
            dot("g2", "t2", "w"),
            f"%d1 = {X} multiply({X} %g2, {X} %normed)",
            f"ROOT %d0 = {X} add({X} %d1, {X} %h1)",
        )
    )
    held = {one.what for one in found.largest if one.bytes == BLOCK and one.part == "activations"}
    assert "h1" in held
    assert "n/normed" not in held


def test_estimate_of_branches_counts_the_larger():
    branch = """
%NAME (s: f32[64,128]) -> f32[] {
  %s = f32[64,128]{1,0} parameter(0)
  %zero = f32[] constant(0)
BODY
  ROOT %r = f32[] reduce(f32[64,128]{1,0} %LAST, f32[] %zero), dimensions={0,1}, to_apply=%add
}
"""
    small = branch.replace("NAME", "small").replace("BODY", "").replace("LAST", "s")
    exponential = f"  %r1 = {X} dot({X} %s, {X} %s), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}"
    large = branch.replace("NAME", "large").replace("BODY", exponential).replace("LAST", "r1")
    step = step_bytes(
        f"%x = {X} parameter(0)",
        "%which = pred[] parameter(1)",
        f"ROOT %c = f32[] conditional(pred[] %which, {X} %x, {X} %x), branch_computations={{%small, %large}}",
        before=small + large,
    )
    assert step == 512 + BLOCK + 512


def test_estimate_of_a_convolutions_update_pads_its_last_axis_where_a_collective_wants_it_last():
    """f32[128,128,4] takes 256 KiB, and 8 MiB with 4 columns padded to 128: the sum, and a copy of the old weights."""
    weight, plain, spread = "f32[128,128,4]{2,1,0}", 256 * KIB, 8 * KIB * KIB

    def update(constraint):
        found = estimate(
            program(
                f"%w = {weight} parameter(0)",
                f"%x = {weight} parameter(1)",
                f"%g = {weight} tanh({weight} %x)",
                f"%sum = {weight} all-reduce({weight} %g), replica_groups={{}}, {constraint}to_apply=%add",
                f"ROOT %new = {weight} subtract({weight} %w, {weight} %sum)",
                aliases="{}: (0, {}, may-alias)",
            )
        )
        return found.num_bytes - 2 * plain

    assert update("") == plain  # the sum is written in the place of what it sums
    assert update("constrain_layout=true, ") == 2 * spread
