"""What rank 0 tells of memory, and that it tells it once."""

import pytest

from xla_b2t.evaluation.decode import DecodingFallback
from xla_b2t.training.memory_log import MemoryLog
from xla_b2t.training.summary import Course


class Shown:
    """A display and an event log that keep what they are told."""

    def __init__(self):
        self.told = []

    def message(self, text):
        self.told.append(text)

    def write(self, kind, step, **values):
        self.told.append((kind, step, values))


def test_memory_log_tells_kernels_again_only_when_they_are_others():
    shown = Shown()
    log = MemoryLog(shown, shown, has_kernels=True)
    for widths in ([512], [512], [], [512]):
        log.kernels(widths)
    words = "recurrent layers run as kernels, by width: "
    assert shown.told == [words + "512", words + "none, loops instead", words + "512"]


def test_memory_log_without_kernels_on_the_device_says_nothing_of_them():
    shown = Shown()
    MemoryLog(shown, shown, has_kernels=False).kernels([512])
    assert shown.told == []


@pytest.mark.parametrize(("text", "lines"), [("Used 2G of 1G hbm", ["  Used 2G of 1G hbm"]), ("", [])])
def test_memory_log_of_decoding_that_falls_back_tells_what_was_refused(text, lines):
    shown = Shown()
    fallback = DecodingFallback(120, 32, 16, (1,), text)
    MemoryLog(shown, shown, has_kernels=False).fell_back(7, fallback)
    *told, (kind, step, values) = shown.told
    assert told == [fallback.in_words(), *lines]
    assert (kind, step, values["phase"], values["after"], values["text"]) == ("fallback", 7, "validate", 16, text)


@pytest.mark.parametrize(("course", "count"), [(Course(), 0), (Course(largest_batch=8), 1)])
def test_memory_log_tells_limits_where_there_are_any(course, count):
    shown = Shown()
    MemoryLog(shown, shown, has_kernels=False).limits(course)
    assert len(shown.told) == count


def test_memory_log_of_another_rank_tells_nothing_and_reads_nothing(monkeypatch):
    monkeypatch.setattr("xla_b2t.training.memory_log.read_memory_use", lambda: pytest.fail("read"))
    log = MemoryLog(None, None, has_kernels=True)
    log.limits(Course(largest_batch=8))
    log.kernels([512])
    log.fell_back(7, DecodingFallback(120, 32, 16, (1,), ""))
    log.in_use(7, None)
