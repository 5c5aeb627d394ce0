"""The wire format of protocol buffers, as far as programs need it: messages are read and changed without a schema.

Source: https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Part:
    """A field of a message.

    Attributes:
        number: of the field.
        value: a whole number, or the bytes of a text or a message; 0 for numbers of a fixed size, which stay unread.
        whole: as it stands in the message, with its tag.
    """

    number: int
    value: int | bytes
    whole: bytes


def parts(message: bytes) -> Iterator[Part]:
    """The fields of a message, in order.

    Raises:
        ValueError: it is no message.
    """
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        kind, value = tag & 7, 0
        if kind == _VARINT:
            value, at = _read_varint(message, at)
        elif kind == _BYTES:
            size, at = _read_varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"there is no field of kind {kind}, as at byte {start}")
        if at > len(message):
            raise ValueError(f"it ends within the field at byte {start}")
        yield Part(tag >> 3, value, message[start:at])


def whole_numbers(part: Part) -> Iterator[int]:
    """Those of a repeated field, or of a piece of one: one number, or bytes that hold many."""
    if isinstance(part.value, int):
        yield part.value
        return
    at = 0
    while at < len(part.value):
        value, at = _read_varint(part.value, at)
        yield value


def replaced(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """The message with every field of that number, bytes all of them, put through `change`."""
    return b"".join(
        field(number, change(part.value)) if part.number == number else part.whole for part in parts(message)
    )


def field(number: int, payload: bytes) -> bytes:
    """A field of bytes, with its tag."""
    return varint(number << 3 | _BYTES) + varint(len(payload)) + payload


def whole_number(number: int, value: int) -> bytes:
    """A field that is a whole number, with its tag."""
    return varint(number << 3 | _VARINT) + varint(value)


def varint(value: int) -> bytes:
    """A whole number, 0 or more."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError(f"there is no number at byte {at}")
