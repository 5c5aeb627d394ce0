"""Where the time of a run goes: seconds by phase, and the pace of the steps that did not compile."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_WINDOW = 4096


class RunClock:
    """Adds up seconds by phase and remembers the last steps.

    Args:
        seconds: what earlier phases, or the run that is resumed, have taken already.
    """

    def __init__(self, seconds: dict[str, float] | None = None):
        self.seconds = dict(seconds or {})
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def step(self, seconds: float, num_trials: int) -> None:
        """Remembers one update that did not compile."""
        self._steps.append((seconds, num_trials))

    @property
    def step_ms_median(self) -> float:
        """Median time of an update, 0 while there is none."""
        return 1000 * statistics.median(seconds for seconds, _ in self._steps) if self._steps else 0.0

    @property
    def trials_per_second(self) -> float:
        """Trials over all ranks in the updates remembered, over their time."""
        total = sum(seconds for seconds, _ in self._steps)
        return sum(trials for _, trials in self._steps) / total if total else 0.0
