"""Verdicts in files."""

import json
import zlib
from dataclasses import replace

import pytest

from xla_b2t.errors import UserError
from xla_b2t.xla.verdict import FORMAT, Verdict, packed, remembered, unpacked

VERDICT = Verdict(True, peak_bytes=5, argument_bytes=1, text="HloModule step\n" * 1000, seconds=1.5)


def test_verdict_is_read_as_it_was_written_and_takes_less_room_than_its_text():
    assert unpacked(packed(VERDICT)) == VERDICT
    assert len(packed(VERDICT)) < len(VERDICT.text) / 10


def test_verdict_that_is_remembered_says_so_and_nothing_else_changes():
    assert not VERDICT.is_remembered
    assert remembered(VERDICT).is_remembered
    assert unpacked(packed(remembered(VERDICT))).text == VERDICT.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"buffers": ""}, False),
        ({"text": ""}, False),
        ({"is_remembered": True}, False),
        ({"accepted": False, "refusal": "RESOURCE_EXHAUSTED", "text": "", "buffers": ""}, True),
        ({"accepted": False, "crash": UserError("it died", "here", "report it")}, False),
    ],
)
def test_verdict_can_be_kept_where_it_is_new_and_whole(changes, expected):
    whole = replace(VERDICT, buffers="allocation 0")
    assert replace(whole, **changes).can_be_kept is expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it does not hold a verdict"),
        (packed(VERDICT)[:-3], "it does not hold a verdict"),
        (zlib.compress(b"[]"), "it does not hold a verdict"),
        (zlib.compress(b"{"), "Expecting property name"),
        (zlib.compress(json.dumps({"format": FORMAT, "verdict": {"peak": 3}}).encode()), "it does not hold a verdict"),
        (zlib.compress(json.dumps({"format": 99, "verdict": {}}).encode()), "format 99, not 2"),
        (zlib.compress(json.dumps({"format": 1, "verdict": {}}).encode()), "format 1, not 2"),
    ],
)
def test_verdict_that_is_damaged_or_of_another_format_is_an_error(content, words):
    with pytest.raises(ValueError, match=words):
        unpacked(content)
