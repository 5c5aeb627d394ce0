"""Messages of protocol buffers, against the examples of their documentation."""

import pytest

from xla_b2t.xla.wire import field, parts, replaced, varint, whole_number, whole_numbers


def test_parts_of_a_message_are_its_fields():
    message = bytes.fromhex("089601") + bytes.fromhex("120774657374696e67") + bytes.fromhex("1a03089601")
    found = [(part.number, part.value) for part in parts(message)]
    assert found == [(1, 150), (2, b"testing"), (3, bytes.fromhex("089601"))]
    assert b"".join(part.whole for part in parts(message)) == message


def test_parts_keep_numbers_of_a_fixed_size_as_they_are():
    message = bytes([4 << 3 | 1, *range(8), 5 << 3 | 5, *range(4), 6 << 3, 1])
    assert [(part.number, part.whole) for part in parts(message)] == [
        (4, message[:9]),
        (5, message[9:14]),
        (6, message[14:]),
    ]


@pytest.mark.parametrize("value", [0, 1, 127, 128, 150, 2**32, 2**63])
def test_whole_number_is_read_as_it_was_written(value):
    ((number, found),) = [(part.number, part.value) for part in parts(whole_number(9, value))]
    assert (number, found) == (9, value)
    assert whole_number(9, value) == varint(9 << 3) + varint(value)


def test_whole_numbers_of_a_field_are_the_same_packed_or_one_by_one():
    numbers = [3, 270, 86942]
    packed = field(4, bytes.fromhex("038e029ea705"))
    assert [number for part in parts(packed) for number in whole_numbers(part)] == numbers
    single = b"".join(whole_number(4, number) for number in numbers)
    assert [number for part in parts(single) for number in whole_numbers(part)] == numbers


def test_replaced_changes_the_fields_of_one_number_only():
    message = field(1, b"a") + field(2, b"b") + whole_number(3, 7) + field(1, b"c")
    assert replaced(message, 1, bytes.upper) == field(1, b"A") + field(2, b"b") + whole_number(3, 7) + field(1, b"C")


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x0b", b"\x08", b"\x08\xff", b"no program"])
def test_parts_of_what_is_no_message_are_an_error(message):
    with pytest.raises(ValueError, match=r"there is no field of kind|it ends within|there is no number at"):
        list(parts(message))
