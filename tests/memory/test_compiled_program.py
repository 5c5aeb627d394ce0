"""Reading a compiled program: loops by their trips, estimates where there are some, bytes elsewhere."""

import pytest

from xla_b2t.memory.compiled_program import by_source, costs, num_bytes, parse

NOTES = 'metadata={op_name="a" source_file="model.py" source_line=7}, backend_config={"estimated_cycles":"100"}'
PROGRAM = """HloModule step

%body.1 (p.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %work.1 = f32[8,128]{1,0:T(8,128)} fusion(%x.1), kind=kLoop, calls=%c.1, %NOTES%
  ROOT %t.1 = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i.1, %work.1)
}

%condition.1 (p.2: (s32[], f32[8,128])) -> pred[] {
  %p.2 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %CONSTANT%
  ROOT %less = pred[] compare(%i.2, %bound), direction=%DIRECTION%
}

ENTRY %step (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = s32[] constant(%START%)
  %state = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%start, %a)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%state), condition=%condition.1, body=%body.1%TRIPS%
  %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%out), replica_groups={{0,1}}, to_apply=%add
  ROOT %moved = f32[8,128]{0,1:T(8,128)} copy(%sum)
}
"""


def text(start="0", constant="%bound = s32[] constant(5)", direction="LT", trips=""):
    filled = PROGRAM.replace("%START%", start).replace("%CONSTANT%", constant).replace("%DIRECTION%", direction)
    return filled.replace("%TRIPS%", trips).replace("%NOTES%", NOTES)


@pytest.mark.parametrize(
    ("program", "turns"),
    [
        (text(), 5),
        (text(start="9", constant="%bound = s32[] constant(0)", direction="GT"), 9),
        (text(constant="%bound = s32[] parameter(1)", trips=', backend_config={"known_trip_count":{"n":"3"}}'), 3),
    ],
)
def test_costs_of_a_loop_are_counted_by_its_trips(program, turns):
    found = {cost.instruction.name: cost for cost in costs(parse(program), bytes_per_cycle=64)}
    assert (found["work.1"].times, found["work.1"].cycles, found["work.1"].loops) == (turns, turns * 100, ("loop",))
    assert found["work.1"].kind == "compiler"


def test_costs_without_an_estimate_follow_from_bytes_and_collectives_are_named():
    found = {cost.instruction.name: cost for cost in costs(parse(text()), bytes_per_cycle=64)}
    assert (found["moved"].kind, found["moved"].cycles) == ("bytes", 2 * 8 * 128 * 4 / 64)
    assert (found["sum"].kind, found["sum"].cycles) == ("collective", 0)
    assert set(found) == {"work.1", "moved", "sum"}


def test_costs_by_source_add_up_the_lines_of_the_model():
    assert by_source(costs(parse(text()), bytes_per_cycle=64))[0] == ("model.py:7", 500)


def test_costs_of_a_loop_without_end_in_sight_raise():
    program = text(start="0", constant="%bound = s32[] constant(0)")
    with pytest.raises(ValueError, match="the trips of loop are not to be found"):
        costs(parse(program), bytes_per_cycle=64)


def test_num_bytes_leaves_out_what_stays_on_the_chip():
    assert num_bytes("bf16[2,3]{1,0:T(8,128)}") == 12
    assert num_bytes("(f32[4]{0}, pred[5]{0:T(8,128)S(1)}, s8[6]{0})") == 22
    assert num_bytes("f32[]") == 4
