"""What is known of a run's course, and how it reads as text.

In: steps, losses, error rates and the time. Out: text and curves. It writes nothing: `progress.py` and `display.py` do.
"""

import math
from collections import deque
from itertools import pairwise

RATE_WINDOW_S = 60.0
"""The remaining time follows from the pace of this many last seconds."""
LEAST_UPDATES = 5
"""So many updates that did not compile before a remaining time is told."""
HISTORY = 256
"""Points kept of a curve; when there are more, every other one is dropped."""


class Meter:
    """The course of one run.

    Args:
        total: updates of the whole run.
        first_step: updates done before this process began.
        now: seconds on any clock, the same in every call.
        best_per: the lowest error rate before this process began.
    """

    def __init__(self, total: int, first_step: int, now: float, best_per: float | None = None):
        self.total = total
        self.step = first_step
        self.phase = "train"
        self.losses = Curve()
        self.pers = Curve()
        if best_per is not None:
            self.pers.lowest = best_per
        self.per_step = 0
        self.trials_per_second = 0.0
        self.began = now
        self._last_update = now
        self._compile_s = 0.0
        self._pace: deque[tuple[float, int]] = deque()

    def update(self, step: int, loss: float | None, trials_per_second: float, now: float) -> None:
        """Takes an update that was made in the present phase; the loss is None where it was not read."""
        self.step = step
        self.trials_per_second = trials_per_second
        if loss is not None:
            self.losses.add(loss)
        if self.phase == "compile":  # that is no pace: it happens once for each length of trial
            self._compile_s += now - self._last_update
        self._last_update = now
        self._pace.append((now - self._compile_s, step))
        while len(self._pace) > 2 and self._pace[-1][0] - self._pace[1][0] > RATE_WINDOW_S:
            self._pace.popleft()

    def validated(self, step: int, per: float) -> bool:
        """Takes a phoneme error rate (0.2 is 20 %); True when it is the best so far."""
        self.pers.add(per)
        self.per_step = step
        return self.pers.lowest == per

    def remaining_s(self, now: float) -> float | None:
        """Seconds to the end at the present pace, None while that is not known."""
        if len(self._pace) < 2:
            return None
        (began, first), (ended, last) = self._pace[0], self._pace[-1]
        if last - first < LEAST_UPDATES:
            return None
        return max(0.0, (self.total - self.step) * (ended - began) / (last - first) - (now - self._last_update))

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return min(1.0, self.step / self.total) if self.total else 1.0

    def progress_text(self) -> str:
        """`1,240/2,000  62 %`, as wide at every step of a run."""
        total = f"{self.total:,}"
        return f"{self.step:>{len(total)},}/{total} {self.share:4.0%}".replace("%", " %")

    def left_text(self, now: float) -> str:
        """`1:05 left`, or how long it has run while the pace is not known."""
        remaining = self.remaining_s(now)
        if self.step >= self.total or remaining is None:
            return f"{_clock_text(now - self.began)} so far"
        return f"{_clock_text(remaining)} left"

    def line(self, now: float) -> str:
        """One plain line with everything that is known."""
        parts = [f"{self.phase} {self.progress_text()}"]
        if self.losses.points:
            parts.append(f"loss {self.losses.last:.3f}")
        if self.pers.points:
            parts.append(f"val PER {self.pers.last:.1%}".replace("%", " %"))
        if self.trials_per_second:
            parts.append(f"{self.trials_per_second:,.0f} trials/s")
        return "   ".join([*parts, self.left_text(now)])


class Curve:
    """The course of one number, thinned so that it stays short however long the run."""

    def __init__(self):
        self.points: list[float] = []
        self.last = math.nan
        self.lowest = math.inf
        self._stride = 1
        self._seen = 0

    def add(self, value: float) -> None:
        """Adds a point."""
        self.last = value
        self.lowest = min(self.lowest, value)
        if self._seen % self._stride == 0:
            self.points.append(value)
        self._seen += 1
        if len(self.points) > HISTORY:
            self.points = self.points[::2]
            self._stride *= 2

    def sparkline(self, width: int) -> str:
        """The curve in at most `width` block characters; each shows the mean of its share of the points."""
        finite = [point for point in self.points if math.isfinite(point)]
        if len(finite) < 2 or width < 2:
            return ""
        width = min(width, len(finite))
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
        low, high = min(means), max(means)
        blocks = "▁▂▃▄▅▆▇█"
        return "".join(blocks[round((mean - low) / ((high - low) or 1.0) * (len(blocks) - 1))] for mean in means)


def _clock_text(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
