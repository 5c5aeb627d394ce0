"""What rank 0 tells people and the event log of its core's memory: limits, falling back, what is in use.

In: what was decided elsewhere. Out: lines of the display, and the events `fallback` and `memory`; on other ranks,
nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict

from xla_b2t.evaluation.decode import DecodingFallback
from xla_b2t.training.events import EventLog
from xla_b2t.training.fallback import Fallback, limits_in_words
from xla_b2t.training.progress import Progress
from xla_b2t.training.summary import Course
from xla_b2t.xla.device_memory import read_memory_use


class MemoryLog:
    """Tells each thing once.

    Args:
        progress, events: of rank 0; None on the others.
        has_kernels: whether the device has kernels for recurrent layers.
    """

    def __init__(self, progress: Progress | None, events: EventLog | None, has_kernels: bool):
        self._progress = progress
        self._events = events
        self._has_kernels = has_kernels
        self._kernels: list[int] | None = None
        self._is_read = False

    def limits(self, course: Course) -> None:
        """What a resumed run does not try again."""
        words = limits_in_words(course.largest_batch, course.largest_validation_batch)
        if self._progress and words:
            self._progress.message(words)

    def kernels(self, widths: Sequence[int]) -> None:
        """Hidden widths that run as kernels, which depends on the batch; told when they are others than before."""
        if self._progress and self._has_kernels and widths != self._kernels:
            said = ", ".join(map(str, widths)) or "none, loops instead"
            self._progress.message(f"recurrent layers run as kernels, by width: {said}")
        self._kernels = list(widths)

    def fell_back(self, step: int, fallback: Fallback | DecodingFallback) -> None:
        """One step down, after so many updates; memory is read again after it."""
        self._is_read = False
        trains = isinstance(fallback, Fallback)
        text = fallback.refused.text if trains else fallback.text
        if self._progress and self._events:
            self._progress.message(fallback.in_words())
            if text:  # rank 0 was refused itself
                self._progress.message(f"  {text}")
            values = fallback.values() if trains else asdict(fallback)
            self._events.write("fallback", step, phase="train" if trains else "validate", **values)

    def in_use(self, step: int, planned_bytes: int | None) -> None:
        """A reading of this core, which is as full as any; nothing where the device does not say.

        Args:
            step: updates done.
            planned_bytes: what was expected of the batch in use; None where nobody planned it.
        """
        if self._is_read or not (self._progress and self._events):
            return
        self._is_read = True
        use = read_memory_use()
        if use:
            self._progress.message(use.in_words(planned_bytes))
            self._events.write("memory", step, **asdict(use), planned_bytes=planned_bytes)
