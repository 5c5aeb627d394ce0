"""Parts of a program's text."""

import pytest

from xla_b2t.memory.program_text import HEAD, closing


@pytest.mark.parametrize(
    ("text", "start", "behind"),
    [
        ("%a, %b), calls=%c", 0, ", calls=%c"),
        ("), metadata={}", 0, ", metadata={}"),
        ("%a{0:T(8,128)(2,1)}, (%b)) done()", 0, " done()"),
        ("((f32[8], (s32[])), pred[]) while(%a)", 1, " while(%a)"),
    ],
)
def test_closing_is_where_the_parenthesis_ends(text, start, behind):
    assert text[closing(text, start)] == ")"
    assert text[closing(text, start) + 1 :] == behind


def test_closing_of_what_is_never_closed_is_the_end():
    assert closing("%a, (%b)") == 8


def test_head_has_the_name_of_a_computation_and_whether_it_is_the_entry():
    assert HEAD.match("ENTRY %main.7 (a: f32[]) -> (f32[], s32[]) {").groups() == ("ENTRY ", "main.7")
    assert HEAD.match("%body.1 (a: (f32[8])) -> f32[8] {").groups() == (None, "body.1")
    assert not HEAD.match("HloModule step, entry_computation_layout={(f32[])->f32[]}")
