"""What the compiler's process tells apart by libtpu's words: slices it does not know, and refusals."""

from types import SimpleNamespace

import pytest

from xla_b2t.xla.tpu_compiler_child import Task, UnknownSlice, devices_of, is_refusal

TASK = Task("v5e:2x4", {"wrap": 1}, 2, 1200.0)


def raises(words):
    def describe(**_):
        raise RuntimeError(words)

    return describe


def test_devices_are_the_first_of_the_topology_that_was_asked_for():
    asked = []

    def describe(**options):
        asked.append(options)
        return SimpleNamespace(devices=["a", "b", "c"])

    assert devices_of(TASK, describe) == ("a", "b")
    assert asked == [{"platform": "tpu", "topology_name": "v5e:2x4", "wrap": 1}]


def test_devices_of_too_small_a_topology_are_an_unknown_slice():
    with pytest.raises(UnknownSlice, match=r"^2 devices are needed, it has 1$"):
        devices_of(TASK, lambda **_: SimpleNamespace(devices=["a"]))


@pytest.mark.parametrize(
    "words",
    [
        'INVALID_ARGUMENT: Topology layout "v5e:7x9" is not divisible by the given chips_per_host_bounds "2x2x1"',
        "INVALID_ARGUMENT: Invalid TPU external name: TPU v9z",
        "INVALID_ARGUMENT: Invalid topology layout for a single slice: 2",
        "INVALID_ARGUMENT: Your TPU topology name nonsense is invalid",
    ],
)
def test_devices_of_a_topology_that_libtpu_does_not_know_are_an_unknown_slice(words):
    with pytest.raises(UnknownSlice) as caught:
        devices_of(TASK, raises(words))
    assert str(caught.value) == words


@pytest.mark.parametrize(
    "words",
    [
        "ABORTED: The TPU is already in use by process with pid 7.",
        "INVALID_ARGUMENT: no such flag",
        "UNAVAILABLE: no topology could be read from the metadata server",
    ],
)
def test_devices_that_the_plug_in_does_not_give_for_another_reason_keep_its_words(words):
    with pytest.raises(RuntimeError) as caught:
        devices_of(TASK, raises(words))
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 15.87G of 15.75G hbm.", True),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: required HBM: 19.12 GiB", True),
        ("RESOURCE_EXHAUSTED: Allocation (size=9) would exceed memory (size=8) :: [space=vmem]", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space sflag. Used 2.1K of 2.0K sflag.", True),
        ("RESOURCE_EXHAUSTED: the kernel wants 70000 words of smem", True),
        ("RESOURCE_EXHAUSTED: could not start a thread: Resource temporarily unavailable", False),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.", False),
        ("RESOURCE_EXHAUSTED: open: Too many open files", False),
        ("INTERNAL: Mosaic failed to compile TPU kernel", False),
    ],
)
def test_refusal_is_what_names_a_memory_of_the_core(words, expected):
    assert is_refusal(words) is expected
