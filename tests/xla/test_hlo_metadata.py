"""Where the operations of a program say that they come from, before it is compiled."""

import pytest

from xla_b2t.xla import frames
from xla_b2t.xla.hlo_metadata import settled
from xla_b2t.xla.wire import field, parts, replaced, varint, whole_number

MODEL, LOOP, TORCH = b"/mine/model.py", b"/mine/loop.py", f"{frames.TORCH[0]}nn/functional.py".encode()
TRACE = frames.__file__.replace("frames.py", "trace.py").encode()
ENTRY, BODY, DEEPER = 9, 4, 300


def operation(name, file, line, frame, called=None):
    places = field(3, file) + whole_number(4, line) if file else b""
    metadata = field(1, b"aten__mm") + field(2, name) + places + (whole_number(15, frame) if frame else b"")
    calls = field(38, varint(called)) if called else b""
    return field(1, b"dot.1") + field(7, metadata) + whole_number(35, 1) + calls


def program(entry_operations, body_operations=(), index=b"", deeper_operations=()):
    def computation(number, operations):
        return field(3, b"".join(field(2, each) for each in operations) + whole_number(5, number))

    head = field(1, b"step") + computation(DEEPER, deeper_operations) + computation(BODY, body_operations)
    head += computation(ENTRY, entry_operations)
    return head + whole_number(6, ENTRY) + field(17, index)


def index(files, locations, frames, functions=()):
    """Files; (file, line) or (file, line, function); (location, caller); functions; all counted from 1."""
    said = b"".join(field(1, file) for file in files) + b"".join(field(2, name) for name in functions)
    for file, line, *function in locations:
        named = b"".join(whole_number(2, number) for number in function)
        said += field(3, whole_number(1, file) + named + whole_number(3, line))
    return said + b"".join(field(4, whole_number(1, place) + whole_number(2, caller)) for place, caller in frames)


def found(program):
    """(name, file, line) of every operation; and the numbers of all fields of the module and of the metadata."""
    rows, numbers = [], set()
    for top in parts(program):
        numbers.add(top.number)
        for part in parts(top.value) if top.number == 3 else ():
            for inner in parts(part.value) if part.number == 2 else ():
                if inner.number == 7:
                    values = {each.number: each.value for each in parts(inner.value)}
                    rows.append((values[2], values.get(3), values.get(4)))
                    numbers |= {100 + number for number in values}
    return rows, numbers


CALLED = index([MODEL, TORCH], [(1, 30), (2, 700)], [(1, 0), (2, 1)])
"""Line 30 of the model, and line 700 of torch, called from there."""


def test_settled_program_has_lines_and_no_frames():
    rows, numbers = found(settled(program([operation(b"aten__mm", MODEL, 30, 1)], index=CALLED)))
    assert rows == [(b"aten__mm", MODEL, 30)]
    assert 17 not in numbers
    assert 115 not in numbers


def test_settled_program_has_the_line_that_called_torch():
    rows, _ = found(settled(program([operation(b"aten__mm", TORCH, 700, 2)], index=CALLED)))
    assert rows == [(b"aten__mm", MODEL, 30)]


def test_settled_program_keeps_the_line_of_torch_that_nobody_called():
    alone = index([TORCH], [(1, 700)], [(1, 0)])
    assert found(settled(program([operation(b"aten__mm", TORCH, 700, 1)], index=alone)))[0][0][1:] == (TORCH, 700)
    assert found(settled(program([operation(b"aten__mm", TORCH, 700, 0)])))[0][0][1:] == (TORCH, 700)


def test_settled_program_keeps_the_lines_of_a_loop_whose_frames_are_of_another_table():
    body = [operation(b"aten__mm", LOOP, 5, 1), operation(b"aten__tanh", TORCH, 700, 2), operation(b"step", b"", 0, 0)]
    rows, numbers = found(settled(program([], body, CALLED)))
    assert rows == [(b"aten__mm", LOOP, 5), (b"aten__tanh", TORCH, 700), (b"step", None, None)]
    assert 115 not in numbers


def test_settled_program_has_the_line_that_called_a_loop_on_what_torch_does_in_it():
    body = [operation(b"add", TORCH, 5, 2), operation(b"while", b"", 0, 0, called=DEEPER)]
    call = operation(b"xla__scan", TORCH, 700, 2, called=BODY)
    deeper = [operation(b"set", b"", 0, 0), operation(b"mine", LOOP, 5, 1)]
    rows, _ = found(settled(program([call], body, CALLED, deeper)))
    assert rows == [
        (b"set", MODEL, 30),
        (b"mine", LOOP, 5),
        (b"add", MODEL, 30),
        (b"while", MODEL, 30),
        (b"xla__scan", MODEL, 30),
    ]


def test_settled_program_names_an_operation_that_gets_a_line_and_had_no_name():
    nameless = field(1, b"while.17") + field(2, b"while") + whole_number(35, 1)
    call = operation(b"xla__scan", TORCH, 700, 2, called=BODY)
    assert (b"while", MODEL, 30) in found(settled(program([call], [nameless], CALLED)))[0]
    assert found(settled(program([nameless], [], CALLED)))[0] == []


HALVES = index(
    [MODEL, TORCH],
    [(1, 30), (2, 458, 1), (2, 482, 2), (2, 844), (1, 31)],
    [(1, 0), (2, 1), (4, 2), (3, 0), (4, 4), (5, 0), (2, 6)],
    [b"forward", b"backward"],
)
"""Line 30 of the model calls a forward half in torch; nobody calls the backward half; and line 31 the forward half."""


def test_settled_program_has_the_line_that_called_the_forward_half_on_the_backward_half():
    one_caller = HALVES[: -len(field(4, whole_number(1, 2) + whole_number(2, 6)))]
    traced = program([operation(b"aten__mm", TORCH, 844, 5)], index=one_caller)
    assert found(settled(traced))[0] == [(b"aten__mm", MODEL, 30)]


def test_settled_program_keeps_the_line_of_a_backward_half_whose_forward_half_has_two_callers():
    traced = program([operation(b"aten__mm", TORCH, 844, 5)], index=HALVES)
    assert found(settled(traced))[0] == [(b"aten__mm", TORCH, 844)]


def test_settled_program_does_not_blame_who_asked_for_the_trace():
    asked = index([MODEL, TRACE, TORCH], [(1, 8), (2, 90), (3, 700)], [(1, 0), (2, 1), (3, 2)])
    assert found(settled(program([operation(b"aten__mm", TORCH, 700, 3)], index=asked)))[0][0][1:] == (TORCH, 700)


def test_settled_program_is_the_same_for_every_trace():
    def traced(number, file):
        first = index([file, MODEL], [(1, 1), (2, 30)], [(1, 0), (2, 1)])
        names = [f"aten__mul.{number}/aten__mul", f"a.{number}/x.5.{number + 1}", "xla__scan"]
        return program([operation(name.encode(), MODEL, 30, 2) for name in names], index=first)

    once, again = settled(traced(35, b"/bin/train.py")), settled(traced(7012, b"/tests/test.py"))
    assert once == again
    assert [row[0] for row in found(once)[0]] == [b"aten__mul/aten__mul", b"a/x.5", b"xla__scan"]


def test_settled_program_differs_where_the_line_does():
    one, other = (settled(program([operation(b"aten__mm", MODEL, line, 0)])) for line in (30, 31))
    assert one != other


def test_settled_program_is_otherwise_untouched():
    traced = program([operation(b"aten__mm", MODEL, 30, 0)], [operation(b"step", LOOP, 1, 0)])
    untouched = replaced(traced, 17, lambda _: b"").replace(field(17, b""), b"")
    assert settled(traced) == untouched
    assert settled(settled(traced)) == settled(traced)


def test_settled_of_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="there is no field of kind 6"):
        settled(b"no program")
