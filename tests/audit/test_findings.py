"""Findings: the order they are told in, what is counted and not told, and how they become one error."""

import pickle

import pytest

from xla_b2t.audit.findings import Collected, Finding, Refused, Report, finding_of, in_words, refuse
from xla_b2t.errors import UserError

EYE = Finding("promotion", "day: matmul", "model.py:31", "float32 (12, 12)", "bfloat16 throughout", "cast it")
DATA = Finding("groups", "groups", "groups", "there are no groups", "", "pre-batch them")


def add(collected, where, kind="promotion", at=None, found="float32"):
    collected.add(kind, "a layer", where, found, "bfloat16", "cast it", at)


def places(collected):
    return [finding.where for finding in collected.list()]


def test_collected_lists_in_the_order_of_the_step_not_of_the_telling():
    collected = Collected()
    collected.now = 9
    add(collected, "m.py:9")
    add(collected, "m.py:2", at=2)
    collected.now = 11
    add(collected, "m.py:11")
    add(collected, "m.py:10", at=10)
    assert places(collected) == ["m.py:2", "m.py:9", "m.py:10", "m.py:11"]


def test_collected_keeps_the_first_of_a_kind_and_place():
    collected = Collected()
    add(collected, "m.py:9", found="first")
    add(collected, "m.py:9", found="second")
    add(collected, "m.py:9", kind="cast", found="third")
    assert [(finding.kind, finding.found) for finding in collected.list()] == [
        ("promotion", "first"),
        ("cast", "third"),
    ]
    assert collected.count == 2
    assert collected.kinds() == {"promotion", "cast"}


def test_collected_first_of_a_kind_is_the_first_that_was_told():
    collected = Collected()
    add(collected, "m.py:9")
    add(collected, "m.py:3", kind="carry")
    add(collected, "m.py:4", kind="carry")
    assert collected.first("carry") == "m.py:3"
    assert collected.first("days") == ""


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "float32"),
        (1, "float32; one operation after it is wider for it"),
        (3, "float32; 3 operations after it are wider for it"),
    ],
)
def test_collected_counts_consequences_with_their_cause(count, words):
    collected = Collected()
    add(collected, "m.py:9")
    for line in range(count):
        collected.follows("m.py:9", f"m.py:{20 + line}")
    assert [finding.found for finding in collected.list()] == [words]


def test_collected_counts_a_consequence_of_a_consequence_with_the_first_cause():
    collected = Collected()
    add(collected, "m.py:9")
    collected.follows("m.py:9", "m.py:20")
    collected.follows("m.py:20", "m.py:30")
    assert collected.cause("m.py:30") == collected.cause("m.py:9") == "m.py:9"
    assert collected.cause("m.py:40") == ""
    assert [finding.found for finding in collected.list()] == ["float32; 2 operations after it are wider for it"]


def test_collected_tells_consequences_once_where_a_line_has_two_findings():
    collected = Collected()
    add(collected, "m.py:9")
    add(collected, "m.py:9", kind="cast")
    collected.follows("m.py:9", "m.py:20")
    assert [finding.found for finding in collected.list()] == [
        "float32; one operation after it is wider for it", "float32",
    ]  # fmt: skip


def test_refuse_without_findings_is_silent():
    refuse([])
    refuse(Report(()).findings)


def test_refuse_of_one_finding_has_the_three_parts_of_a_user_error():
    with pytest.raises(Refused) as caught:
        refuse([EYE])
    error = caught.value
    assert error.what == "day: matmul: found float32 (12, 12), expected bfloat16 throughout"
    assert (error.where, error.fix) == ("model.py:31", "cast it")
    assert str(error) == f"{error.what}\n  where: model.py:31\n  fix:   cast it"


def test_refuse_of_several_findings_numbers_them_and_keeps_each_with_its_place_and_fix():
    with pytest.raises(UserError) as caught:
        refuse([DATA, EYE])
    error = caught.value
    assert str(error).splitlines() == [
        "2 things must change before this run can start:",
        "(1) there are no groups",
        "    where: groups",
        "    fix:   pre-batch them",
        "(2) day: matmul: found float32 (12, 12), expected bfloat16 throughout",
        "    where: model.py:31",
        "    fix:   cast it",
    ]
    assert error.what.splitlines()[1:] == [
        "(1) there are no groups", "(2) day: matmul: found float32 (12, 12), expected bfloat16 throughout",
    ]  # fmt: skip
    assert error.where.splitlines() == ["groups", "model.py:31"]
    assert error.fix.splitlines() == ["pre-batch them", "cast it"]


@pytest.mark.parametrize("findings", [[EYE], [DATA, EYE]])
def test_refused_survives_pickling_between_processes(findings):
    error = Refused(findings)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is Refused
    assert str(again) == str(error)
    assert (again.what, again.where, again.fix) == (error.what, error.where, error.fix)


def test_in_words_of_a_finding_whose_found_says_it_is_that():
    assert in_words(DATA) == "there are no groups"


def test_finding_of_an_error_keeps_its_parts():
    found = finding_of(UserError("there are no groups", "groups", "pre-batch them"), "groups")
    assert found == DATA
