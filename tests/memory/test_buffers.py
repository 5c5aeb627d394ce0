"""Reading a buffer assignment: places, and the fullest moment, counted by hand."""

import pytest

from xla_b2t.memory.buffers import HBM, VMEM, Block, Value, fullest, parse

TEXT = """\
allocation 1: size 4096, parameter 3, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <6 Arg_3.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
 value: <9 fusion.2{1} @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 2: size 512, output shape is |(f32[1024])|, maybe-live-out:
allocation 3: size 1024, constant:
 value: <7 constant.5 @0> (size=1024,offset=0): s32[246]{0:T(256)}
allocation 4: size 3000, preallocated-temp:
 value: <10 while.14{3} (phi) @0> (size=2000,offset=1000): bf16[10,100]{1,0}
allocation 5: size 640, color 1, preallocated-temp:
 value: <11 copy-start{0} @0> (size=640,offset=0): bf16[320]{0:S(1)}
    Arg_3.1{}:0-4
    fusion.2{1}:4-9
    while.14{3}:2-8
    copy-start{0}:1-3
    while.15{3}:2-8
"""


def test_parse_gives_allocations_with_kind_space_and_values_in_their_ranges():
    blocks = parse(TEXT)
    assert [(block.kind, block.parameter, block.space, block.bytes) for block in blocks] == [
        ("parameter", 3, HBM, 4096),
        ("output", -1, HBM, 512),
        ("constant", -1, HBM, 1024),
        ("temporary", -1, HBM, 3000),
        ("temporary", -1, VMEM, 640),
    ]
    assert blocks[0].values == [
        Value("Arg_3.1", "{}", 4096, 0, "f32[1024]{0:T(1024)}", 0, 4),
        Value("fusion.2", "{1}", 4096, 0, "f32[1024]{0:T(1024)}", 4, 9),
    ]
    assert blocks[3].values == [Value("while.14", "{3}", 2000, 1000, "bf16[10,100]{1,0}", 2, 8)]
    assert blocks[4].values == [Value("copy-start", "{0}", 640, 0, "bf16[320]{0:S(1)}", 1, 3)]


def temporary(*places):
    """An allocation of values (bytes, offset, first, last)."""
    values = [
        Value(f"v{i}", "{}", size, offset, "", first, last) for i, (size, offset, first, last) in enumerate(places)
    ]
    return Block("temporary", -1, HBM, 10_000, values)


@pytest.mark.parametrize(
    ("places", "moment", "size"),
    [
        ([(100, 0, 0, 1), (50, 100, 1, 2), (100, 0, 2, 3)], 1, 150),  # a chain: two at a time, the third in the first's
        ([(100, 0, 0, 5), (100, 0, 2, 9), (30, 100, 7, 7)], 7, 130),  # carried by a loop, changed in place
        ([(100, 0, 0, 3), (40, 20, 1, 2), (10, 100, 5, 5)], 0, 100),  # a part of a tuple lies in it
        ([(10, 0, 0, 9), (10, 5000, 0, 9), (10, 200, 3, 4)], 3, 30),  # gaps are not needed
        ([(10, 0, 0, -1)], 0, 0),  # of no range
        ([], 0, 0),
    ],
    ids=["chain", "in place", "part", "gaps", "no range", "empty"],
)
def test_fullest_counts_what_is_needed_at_once_and_every_place_once(places, moment, size):
    assert fullest([temporary(*places)]) == (moment, size)


def test_fullest_of_two_allocations_counts_both():
    assert fullest([temporary((100, 0, 0, 3)), temporary((100, 0, 2, 5))]) == (2, 200)
