"""What of a traced program reaches memory."""

from xla_b2t.memory.kernels import gather
from xla_b2t.memory.traced_program import parse, written_out

X = "f32[64,128]{1,0}"
HALF = "bf16[64,128]{1,0}"


def written(*lines):
    """Names of the operations whose results are written, in order."""
    inside = "\n".join(f"  {line}" for line in lines)
    program = parse(f"HloModule step\n\nENTRY %step (a: f32[]) -> f32[] {{\n{inside}\n}}\n")
    found = gather(written_out(program, "step"))
    return [found.kernels[place].operation.name for place in sorted(found.kernels)]


def dot(name, left, right="w"):
    attributes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = {X} dot({X} %{left}, f32[128,128]{{1,0}} %{right}), {attributes}"


ARGUMENTS = (f"%x = {X} parameter(0)", "%w = f32[128,128]{1,0} parameter(1)", "%n = f32[] constant(2)")
MANY = f"%many = {X} broadcast(f32[] %n), dimensions={{}}"


def test_kernels_of_simple_work_on_one_array_do_it_for_each_reader():
    assert written(
        *ARGUMENTS,
        MANY,
        dot("h", "x"),
        f"%scaled = {X} divide({X} %h, {X} %many)",
        dot("a", "scaled"),
        f"%b = {X} tanh({X} %scaled)",
        f"ROOT %out = ({X}, {X}) tuple({X} %a, {X} %b)",
    ) == ["h", "a", "b"]


def test_kernels_of_costly_work_write_it_once():
    assert written(
        *ARGUMENTS,
        dot("h", "x"),
        f"%t = {X} tanh({X} %h)",
        dot("a", "t"),
        f"%b = {X} negate({X} %t)",
        f"ROOT %out = ({X}, {X}) tuple({X} %a, {X} %b)",
    ) == ["t", "a", "b"]


def test_kernels_write_the_narrower_of_two():
    lines = (
        *ARGUMENTS,
        dot("h", "x"),
        f"%e = {X} exponential({X} %h)",
        f"%half = {HALF} convert({X} %e)",
        f"%again = {X} convert({HALF} %half)",
        dot("a", "again"),
        f"%b = {X} negate({X} %again)",
        f"ROOT %out = ({X}, {X}) tuple({X} %a, {X} %b)",
    )
    assert written(*lines) == ["half", "a", "b"]


def test_kernels_of_what_a_loop_or_a_collective_reads_write_it():
    assert written(
        *ARGUMENTS,
        f"%e = {X} negate({X} %x)",
        f"ROOT %sum = {X} all-reduce({X} %e), to_apply=%add",
    ) == ["e", "sum"]


def test_kernels_of_changes_of_shape_write_nothing_unless_the_order_changes():
    lines = (
        *ARGUMENTS,
        dot("h", "x"),
        f"%view = f32[8,1,8,128]{{3,2,1,0}} reshape({X} %h)",
        "%same = f32[8,8,1,128]{3,2,1,0} transpose(f32[8,1,8,128]{3,2,1,0} %view), dimensions={0,2,1,3}",
        f"%turned = f32[128,64]{{1,0}} transpose({X} %h), dimensions={{1,0}}",
    )
    last = "ROOT %sum = f32[8,8,1,128]{3,2,1,0} all-reduce(f32[8,8,1,128]{3,2,1,0} %same), to_apply=%add"
    assert written(*lines, last) == ["h", "sum"]
    last = "ROOT %sum = f32[128,64]{1,0} all-reduce(f32[128,64]{1,0} %turned), to_apply=%add"
    assert written(*lines, last) == ["turned", "sum"]


def test_kernels_of_what_nobody_reads_are_left_out():
    assert written(*ARGUMENTS, dot("unused", "x"), f"ROOT %out = {X} negate({X} %x)") == ["out"]
