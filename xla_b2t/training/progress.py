"""What a person sees while a run trains.

In: steps, losses, validations and messages from rank 0. Out, on stderr: a live display when that is a terminal, else a
calm line every ten seconds and at every validation. Nothing here is needed for training; the log is `events.py`.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TextIO

LINE_EVERY_S = 10.0
"""Without a terminal: seconds between two lines."""
RATE_WINDOW_S = 60.0
"""The remaining time follows from the pace of this many last seconds."""
HISTORY = 256
"""Points kept of a curve; when there are more, every other one is dropped."""


class Meter:
    """What is known of a run's course, and how it reads. It maps updates to text; it writes nothing.

    Args:
        total: updates of the whole run.
        first_step: updates done before this process began.
        now: seconds on any clock, the same in every call.
    """

    def __init__(self, total: int, first_step: int, now: float):
        self.total = total
        self.step = first_step
        self.phase = "train"
        self.losses = Curve()
        self.pers = Curve()
        self.per_step = 0
        self.trials_per_second = 0.0
        self.began = now
        self._pace: deque[tuple[float, int]] = deque()

    def update(self, step: int, loss: float | None, trials_per_second: float, now: float) -> None:
        """Takes an update; the loss is None where it was not read."""
        self.step = step
        self.trials_per_second = trials_per_second
        if loss is not None:
            self.losses.add(loss)
        self._pace.append((now, step))
        while len(self._pace) > 2 and now - self._pace[1][0] > RATE_WINDOW_S:
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
        if last == first:
            return None
        return max(0.0, (self.total - self.step) * (ended - began) / (last - first) - (now - ended))

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


class Progress:
    """Shows a run on stderr. Use it as a context manager: the terminal is restored on every way out.

    Args:
        stream: where to write; None takes stderr as it is at this moment.
        clock: seconds that only grow.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live = None
        self._meter: Meter | None = None
        self._last_line = -math.inf

    def start(self, total: int, first_step: int = 0) -> None:
        """Begins with a run of `total` updates, `first_step` of them done."""
        self._meter = Meter(total, first_step, self._clock())
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            # Imported here: without a terminal there is no need for it.
            from xla_b2t.training.display import open_display

            self._live = open_display(self._stream, self._meter, self._clock)
        else:
            resumed = f", {first_step:,} of them done" if first_step else ""
            self._print(f"train {total:,} updates{resumed}")

    def phase(self, name: str) -> None:
        """Names what is being done: `compile`, `train`, `validate`, `save`."""
        if self._meter:
            self._meter.phase = name

    def update(self, step: int, loss: float | None, trials_per_second: float) -> None:
        """Shows that `step` updates are done; `loss` is None where it was not read from the core."""
        meter, now = self._started(), self._clock()
        meter.update(step, loss, trials_per_second, now)
        if self._live is None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._print(meter.line(now))

    def validated(self, step: int, per: float) -> None:
        """Shows a validation: the phoneme error rate, 0.2 for 20 %."""
        best = self._started().validated(step, per)
        text = f"step {step:,}   val PER {100 * per:.1f} %"
        self.message(text + ("   best so far" if best else f"   best {100 * self._started().pers.lowest:.1f} %"))

    def message(self, text: str) -> None:
        """Shows a line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def close(self) -> None:
        """Shows the last state and gives the terminal back. Closing twice is fine."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._meter and self._meter.losses.points:
            self._print(self._meter.line(self._clock()))
        self._meter = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _started(self) -> Meter:
        assert self._meter is not None, "Progress.start comes first"
        return self._meter

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _clock_text(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
