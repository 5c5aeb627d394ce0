"""Readings of a core's memory by all the names they have had, and none where there is none."""

import pytest

from xla_b2t.xla.device_memory import MemoryUse, read_memory_use

GIB = 2**30


def fails(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"bytes_used": 2 * GIB, "bytes_limit": 16 * GIB, "peak_bytes_used": 3 * GIB},
            MemoryUse(2 * GIB, 16 * GIB, 3 * GIB),
        ),
        ({"bytes_used": 2 * GIB, "bytes_limit": 16 * GIB}, MemoryUse(2 * GIB, 16 * GIB)),
        ({"kb_total": 16 * 2**20, "kb_free": 14 * 2**20}, MemoryUse(2 * GIB, 16 * GIB)),
        ({"bytes_in_use": 7}, None),
        ({"kb_total": None, "kb_free": 1}, None),
        ({}, None),
    ],
)
def test_reading_is_understood_under_every_name(found, expected):
    assert read_memory_use(lambda: found) == expected


ERRORS = [
    RuntimeError("UNIMPLEMENTED: GetAllocatorStats"),
    ValueError("no such device"),
    AttributeError("module 'torch_xla.core.xla_model' has no attribute 'get_memory_info'"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_reading_where_the_device_has_none_is_none(error):
    assert read_memory_use(fails(error)) is None


def test_reading_on_a_cpu_breaks_nothing():
    assert read_memory_use() is None


def test_reading_in_words_stands_beside_the_plan():
    use = MemoryUse(int(1.7 * GIB), int(15.75 * GIB), int(2.31 * GIB))
    assert use.in_words(int(2.28 * GIB)) == "HBM in use 1.7 of 15.8 GiB, 2.3 at its peak (planned 2.28)"
    assert MemoryUse(GIB, 2 * GIB).in_words() == "HBM in use 1.0 of 2.0 GiB"
