"""Bytes of arrays in a TPU core's memory, against layouts that its compiler has printed."""

import pytest

from xla_b2t.memory.layout import element_bits, ordered_bytes, padded_bytes, plain_bytes


@pytest.mark.parametrize(
    ("kind", "sizes", "num_bytes"),
    [
        ("f32", (8, 128), 4096),
        ("f32", (9, 128), 2 * 4096),  # two tiles of (8,128)
        ("f32", (8, 129), 2 * 4096),
        ("f32", (3, 128), 4 * 128 * 4),  # (4,128)
        ("bf16", (247, 64, 768), 247 * 64 * 768 * 2),
        ("bf16", (64, 1250, 512), 64 * 1250 * 512 * 2),  # {2,0,1}: 64 stands next to the last axis
        ("f32", (247, 64, 65), 256 * 64 * 65 * 4),  # 247 columns pad less than 65 do
        ("pred", (45, 64), 48 * 128),
        ("bf16", (1, 1, 768), 1024 * 2),
        ("f32", (2304,), 3 * 1024 * 4),  # {0:T(1024)}
        ("f32", (288,), 512 * 4),  # {0:T(512)}
        ("s32", (246,), 256 * 4),
        ("bf16", (41,), 256 * 2),  # {0:T(256)(128)(2,1)}
        ("pred", (64,), 512),
        ("f32", (), 512),
        ("u64", (2,), 2 * 512),
        ("f32", (0, 5), 0),
        ("token", (), 0),
    ],
)
def test_padded_bytes_of_an_array_fill_whole_tiles(kind, sizes, num_bytes):
    assert padded_bytes(kind, sizes) == num_bytes


def test_plain_bytes_of_an_array_are_those_of_its_elements():
    assert (plain_bytes("bf16", (9, 129)), plain_bytes("s4", (3,))) == (9 * 129 * 2, 2)


def test_element_bits_of_an_unknown_kind_are_refused():
    with pytest.raises(ValueError, match="elements strange are of a size"):
        element_bits("strange")


def test_ordered_bytes_of_an_array_pad_the_axes_that_are_written_last():
    assert ordered_bytes("f32", (512, 512, 4)) == 512 * 512 * 128 * 4  # {2,1,0:T(8,128)}
    assert ordered_bytes("f32", (2304, 768)) == padded_bytes("f32", (2304, 768))
    assert ordered_bytes("f32", (768,)) == padded_bytes("f32", (768,))
