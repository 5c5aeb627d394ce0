"""The trips of loops, in every form that the compiler gives their counters."""

import pytest

from xla_b2t.memory.compiled_program import parse
from xla_b2t.memory.trips import trips

LOOP = """HloModule one

%inside (c: s32[], d: s32[]) -> pred[] {
  %c.1 = s32[] parameter(0)
  %d.1 = s32[] parameter(1)
  ROOT %compare.1 = pred[] compare(%c.1, %d.1), direction=LT
}

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p.1 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %by.1 = s32[]{:T(128)} constant(%BY%)
  %next = s32[]{:T(128)} %CHANGE%(%i.1, %by.1)
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %n.1 = s32[] get-tuple-element(%p.1), index=2
  ROOT %t.1 = (s32[], f32[8]{0}, s32[]) tuple(%next, %x.1, %n.1)
}

%condition (p: (s32[], f32[8], s32[])) -> pred[] {
  %far = s32[] constant(1000)
  %bound = s32[]{:T(128)} constant(%BOUND%)
  %p.2 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %n.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=2
  ROOT %goes.on = pred[]{:T(512)} %CONDITION%
}

ENTRY %one (a: f32[8], b: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = s32[] parameter(1)
  %seven = s32[]{:T(128)} constant(7)
  %start = s32[]{:T(128)} constant(%START%)
  %started = s32[]{:T(128)} copy(%start)
  %state = (s32[], f32[8]{0}, s32[]) tuple(%started, %a, %LAST%)
  %loop = (s32[], f32[8]{0}, s32[]) while(%state), condition=%condition, body=%body%KNOWN%
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def found(start=0, bound=5, compare="LT", change="add", by=1, condition="", last="%seven", known=""):
    text = LOOP.replace("%START%", str(start)).replace("%BOUND%", str(bound)).replace("%BY%", str(by))
    text = text.replace("%CONDITION%", condition or f"compare(%i.2, %bound), direction={compare}")
    return trips_of(text.replace("%CHANGE%", change).replace("%LAST%", last).replace("%KNOWN%", known))


def trips_of(text):
    program = parse(text)
    around = program.computations[program.entry]
    (loop,) = (instruction for instruction in around if instruction.opcode == "while")
    return trips(program.computations, loop, around)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ({}, 5),
        ({"start": 2}, 3),
        ({"start": -3, "compare": "LE"}, 9),
        ({"by": 2}, 3),
        ({"compare": "NE"}, 5),
        ({"start": 5}, 0),
        ({"start": 9, "bound": 0, "compare": "GT", "change": "subtract"}, 9),
        ({"start": 9, "bound": 2, "compare": "GE", "by": -1}, 8),
        ({"start": 9, "bound": 1, "compare": "GT", "by": -1}, 8),
        ({"condition": "compare(%i.2, %n.2), direction=LT"}, 7),
        ({"condition": "compare(%bound, %i.2), direction=GT"}, 5),
        ({"condition": "fusion(%i.2, %bound), kind=kLoop, calls=%inside"}, 5),
        ({"last": "%b"}, 5),
        ({"start": 0, "bound": 0, "known": ', backend_config={"known_trip_count":{"n":"3"}}'}, 3),
    ],
)
def test_trips_follow_from_the_start_the_change_and_the_compare(loop, expected):
    assert found(**loop) == expected


@pytest.mark.parametrize(
    "loop",
    [
        {"condition": "compare(%i.2, %n.2), direction=LT", "last": "%b"},
        {"start": 9, "by": 0, "compare": "NE"},
        {"start": 1, "by": 2, "bound": 4, "compare": "NE"},
        {"change": "popcount"},
    ],
)
def test_trips_that_the_program_does_not_say_raise(loop):
    with pytest.raises(ValueError, match="the trips of loop are not to be found in the program"):
        found(**loop)


# What the compiler makes of a counter of 64 bits, as torch_xla's scan has one: two words and a carry.
TWO_WORDS = """HloModule two

%body (p: (u32[], u32[], u32[])) -> (u32[], u32[], u32[]) {
  %p.1 = (u32[]{:T(128)}, u32[]{:T(128)}, u32[]{:T(128)}) parameter(0)
  %low.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  %one.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=2
  %sum.1 = u32[]{:T(128)S(6)} add(%low.1, %one.1)
  %carried = pred[]{:T(512)S(6)} compare(%sum.1, %low.1), direction=LT
  %high.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=1
  %more.1 = u32[]{:T(128)S(6)} add(%high.1, %one.1)
  %next.1 = u32[]{:T(128)} select(%carried, %more.1, %high.1)
  ROOT %t.1 = (u32[]{:T(128)}, u32[]{:T(128)}, u32[]{:T(128)}) tuple(%sum.1, %next.1, %one.1)
}

%condition (p: (u32[], u32[], u32[])) -> pred[] {
  %zero.2 = s32[]{:T(128)} constant(0)
  %nothing.2 = u32[]{:T(128)} constant(%HIGH%)
  %nine.2 = u32[]{:T(128)} constant(9)
  %p.2 = (u32[]{:T(128)}, u32[]{:T(128)}, u32[]{:T(128)}) parameter(0)
  %high.2 = u32[]{:T(128)} get-tuple-element(%p.2), index=1
  %signed.2 = s32[]{:T(128)S(6)} bitcast-convert(%high.2)
  %negative.2 = pred[]{:T(512)S(6)} compare(%signed.2, %zero.2), direction=LT
  %equal.2 = pred[]{:T(512)S(6)} compare(%high.2, %nothing.2), direction=EQ
  %low.2 = u32[]{:T(128)} get-tuple-element(%p.2), index=0
  %less.2 = pred[]{:T(512)S(6)} compare(%low.2, %nine.2), direction=LT
  %both.2 = pred[]{:T(512)S(6)} and(%equal.2, %less.2)
  ROOT %either.2 = pred[]{:T(512)} or(%negative.2, %both.2)
}

ENTRY %two (a: u32[]) -> u32[] {
  %a = u32[] parameter(0)
  %low = u32[]{:T(128)} constant(%LOW%)
  %high = u32[]{:T(128)} constant(%HIGH_START%)
  %one = u32[]{:T(128)} constant(1)
  %sent = (u32[]{:T(128)S(1)}, u32[]{:T(128)}, u32[]{:S(2)}) copy-start(%low)
  %come = u32[]{:T(128)S(1)} copy-done(%sent)
  %state = (u32[]{:T(128)}, u32[]{:T(128)}, u32[]{:T(128)}) tuple(%come, %high, %one)
  %loop = (u32[]{:T(128)}, u32[]{:T(128)}, u32[]{:T(128)}) while(%state), condition=%condition, body=%body
  ROOT %out = u32[] get-tuple-element(%loop), index=0
}
"""


@pytest.mark.parametrize(("high", "low", "expected"), [(0, 0, 9), (0, 4, 5), (2**32 - 1, 2**32 - 2, 11)])
def test_trips_of_a_counter_in_two_words_carry_from_one_to_the_other(high, low, expected):
    text = TWO_WORDS.replace("%HIGH%", "0").replace("%HIGH_START%", str(high)).replace("%LOW%", str(low))
    assert trips_of(text) == expected
