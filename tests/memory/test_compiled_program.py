"""Reading a compiled program: its operations, and their shapes and places."""

import pytest

from xla_b2t.memory.compiled_program import arrays, hbm_bytes, num_bytes, parse

NOTES = 'metadata={op_name="a" source_file="model.py" source_line=7}, backend_config={"estimated_cycles":"100"}'
PROGRAM = """HloModule step, is_scheduled=true

%inner (p.1: f32[8,128]) -> f32[8,128] {
  %p.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %twice.1 = f32[8,128]{1,0:T(8,128)} add(%p.1, %p.1)
}

ENTRY %step (a: f32[8,128]) -> (f32[8,128], s32[]) {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = ((f32[8,128]{1,0:T(8,128)}), f32[4,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a), %SLICED%
  %work = f32[8,128]{1,0:T(8,128)} fusion(%a, /*index=1*/%start), kind=kLoop, calls=%inner, %NOTES%
  %n = s32[]{:T(128)S(6)} constant(3)
  ROOT %t = (f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%work, %n)
}
""".replace("%NOTES%", NOTES).replace("%SLICED%", "slice={[0:4], [0:128]}")


def test_parse_reads_operations_in_their_order():
    program = parse(PROGRAM)
    assert program.entry == "step"
    assert [each.opcode for each in program.computations["inner"]] == ["parameter", "add"]
    opcodes = ["parameter", "slice-start", "fusion", "constant", "tuple"]
    assert [each.opcode for each in program.computations["step"]] == opcodes
    work = program.computations["step"][2]
    assert (work.operands, work.cycles, work.source, work.is_root) == (("a", "start"), 100, "model.py:7", False)
    assert program.computations["step"][-1].is_root
    assert program.shapes["twice.1"] == "f32[8,128]{1,0:T(8,128)}"


def test_parse_reads_a_tuple_in_a_tuple():
    start = parse(PROGRAM).computations["step"][1]
    assert start.operands == ("a",)
    assert [array.in_hbm for array in arrays(start.shape)] == [True, False, False]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[2,3]{1,0:T(8,128)}", 12),
        ("(f32[4]{0}, pred[5]{0:T(8,128)S(1)}, s8[6]{0})", 27),
        ("f32[]", 4),
        ("f8e4m3fn[3,5]{1,0:T(8,128)(4,1)}", 15),
        ("s4[3,5]{1,0}", 8),
        ("(c64[2]{0}, token[], /*index=2*/f8e5m2[<=7]{0})", 23),
    ],
)
def test_num_bytes_counts_every_type_of_element(shape, expected):
    assert num_bytes(shape) == expected


def test_num_bytes_of_an_unknown_type_raise():
    with pytest.raises(ValueError, match="the elements posit are of a size that is not known"):
        num_bytes("posit[4]{0}")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("bf16[300,200]{0,1:T(8,128)(2,1)}", 384 * 200 * 2),
        ("f32[5,9,130]{2,1,0:T(8,128)}", 5 * 16 * 256 * 4),
        ("s32[249]{0:T(256)}", 256 * 4),
        ("f32[]{:T(128)}", 4),
        ("(f32[128]{0:T(128)S(1)}, f32[128]{0:T(128)}, u32[]{:S(2)})", 128 * 4),
        ("bf16[128]{0:T(128)S(3)}", 0),
        ("f32[3,5]{1,0}", 60),
    ],
)
def test_hbm_bytes_are_padded_to_tiles_and_leave_out_what_is_elsewhere(shape, expected):
    assert hbm_bytes(shape) == expected
