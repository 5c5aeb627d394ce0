"""Reading a traced program: operations, calls in their place, donated parameters."""

import pytest

from xla_b2t.memory.traced_program import parse, written_out

PROGRAM = """HloModule step.9, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }

%half.1 (x.1: f32[4], y.1: f32[4]) -> (f32[4], f32[4]) {
  %y.1 = f32[4]{0} parameter(1), metadata={op_type="a" op_name="a" source_file="/m.py" source_line=3}
  %x.1 = f32[4]{0} parameter(0)
  %sum.1 = f32[4]{0} add(f32[4]{0} %x.1, f32[4]{0} %y.1), metadata={op_name="b" source_file="/m (1).py" source_line=4}
  ROOT %both.1 = (f32[4]{0}, f32[4]{0}) tuple(f32[4]{0} %sum.1, f32[4]{0} %y.1)
}

ENTRY %step.9 (a: f32[4], b: f32[4]) -> (f32[4], f32[4], /*index=2*/f32[4]) {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %c = f32[2]{0} constant({1, 2})
  %call.1 = (f32[4]{0}, f32[4]{0}) call(f32[4]{0} %b, f32[4]{0} %a), to_apply=%half.1
  %one = f32[4]{0} get-tuple-element((f32[4]{0}, f32[4]{0}) %call.1), index=0
  ROOT %out = (f32[4]{0}, f32[4]{0}, /*index=2*/f32[4]{0}) tuple(f32[4]{0} %one, f32[4]{0} %a, /*index=2*/f32[4]{0} %b)
  %unused = f32[<=8]{0} sine(f32[<=8]{0} %one)
}
"""


def by_name(operations):
    return {operation.name: operation for operation in operations}


def test_parse_of_a_program_tells_arrays_operands_and_lines_apart():
    program = parse(PROGRAM)
    inside = by_name(program.computations["half.1"])
    assert inside["sum.1"].operands == ("x.1", "y.1")
    assert inside["sum.1"].source == "/m (1).py:4"
    assert inside["both.1"].arrays == (("f32", (4,)), ("f32", (4,)))
    assert (inside["y.1"].argument, inside["x.1"].source) == ("1", "")
    entry = by_name(program.computations[program.entry])
    assert entry["call.1"].called == {"to_apply": "half.1"}
    assert (entry["c"].operands, entry["unused"].arrays) == ((), (("f32", (8,)),))


def test_parse_of_a_program_finds_what_is_donated_and_a_result_in_the_midst():
    program = parse(PROGRAM)
    assert program.aliases == {0: 1, 2: 0}
    result = program.computations["step.9"][-1]
    assert (result.opcode, result.operands) == ("bitcast", ("out",))


def test_written_out_calls_stand_in_their_place():
    program = parse(PROGRAM)
    operations = by_name(written_out(program, "step.9"))
    assert operations["call.1/x.1"].operands == ("b",)
    assert operations["call.1/sum.1"].operands == ("call.1/x.1", "call.1/y.1")
    assert operations["call.1"].operands == ("call.1/both.1",)
    assert not any(operation.opcode == "call" for operation in operations.values())


def test_parse_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no computation is marked as the entry"):
        parse("module @jit_step {\n}\n")


NORM = """HloModule norm

ENTRY %norm (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8]{0} parameter(1)
  %norm.1 = (f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) batch-norm-training(f32[4,8]{1,0} %x, f32[8]{0} %w, f32[8]{0} %w), epsilon=1, feature_index=1
  ROOT %out = f32[4,8]{1,0} get-tuple-element((f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) %norm.1), index=0
}
"""  # noqa: E501


def test_written_out_batch_norm_is_sums_and_element_wise_work():
    operations = by_name(written_out(parse(NORM), "norm"))
    sums, normed = operations["norm.1/sums"], operations["norm.1/normed"]
    assert (sums.opcode, sums.arrays) == ("reduce", (("f32", (8,)), ("f32", (8,))))
    assert (normed.opcode, normed.arrays, normed.operands[-1]) == ("multiply", (("f32", (4, 8)),), "norm.1/sums")
    assert operations["norm.1"].opcode == "tuple"


def test_written_out_operations_without_a_line_have_that_of_the_call():
    line = ', metadata={op_name="scan" source_file="/user/model.py" source_line=7}'
    text = PROGRAM.replace("to_apply=%half.1", f"to_apply=%half.1{line}")
    operations = by_name(written_out(parse(text), "step.9"))
    assert operations["call.1/both.1"].source == "/user/model.py:7"
    assert operations["call.1/sum.1"].source == "/m (1).py:4"
