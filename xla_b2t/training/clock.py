"""Where the time of a run goes: seconds by phase, and the pace of the steps that did not compile."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("start", "preflight", "compile", "train", "validate", "checkpoint")
_WINDOW = 4096


class RunClock:
    """Adds up seconds by phase and remembers the last steps.

    Args:
        seconds: what earlier phases have taken already.
        compile_seconds: a reading of the seconds that compiling has taken; they are a phase of their own, wherever
            they occur.
    """

    def __init__(self, seconds: dict[str, float], compile_seconds: Callable[[], float]):
        self.seconds = dict.fromkeys(PHASES, 0.0) | seconds
        self._compile_seconds = compile_seconds
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase, and what of it was compiling to that."""
        start, compiled = time.monotonic(), self._compile_seconds()
        try:
            yield
        finally:
            compiled = self._compile_seconds() - compiled
            self.add("compile", compiled)
            self.add(name, time.monotonic() - start - compiled)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def step(self, seconds: float, num_trials: int) -> None:
        """Remembers one update that did not compile."""
        self._steps.append((seconds, num_trials))

    def wait(self, seconds: float) -> None:
        """Adds to the last update the time that the core still needed for it, where the host waited for that."""
        if self._steps:
            last_seconds, num_trials = self._steps.pop()
            self._steps.append((last_seconds + seconds, num_trials))

    @property
    def step_ms_median(self) -> float:
        """Median time of an update, 0 while there is none."""
        return 1000 * statistics.median(seconds for seconds, _ in self._steps) if self._steps else 0.0

    @property
    def trials_per_second(self) -> float:
        """Trials over all ranks in the updates remembered, over their time, waiting for the core included."""
        total = sum(seconds for seconds, _ in self._steps)
        return sum(trials for _, trials in self._steps) / total if total else 0.0
