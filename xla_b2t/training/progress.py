"""What a person sees while a run trains.

In: steps, losses, validations and messages from rank 0. Out, on stderr: a live display when that is a terminal, else a
calm line every ten seconds and at every validation. Nothing here is needed for training; the log is `events.py`.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from xla_b2t.training.meter import Meter

LINE_EVERY_S = 10.0
"""Without a terminal: seconds between two lines."""


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

    def start(self, total: int, first_step: int = 0, best_per: float | None = None) -> None:
        """Begins with a run of `total` updates, `first_step` of them done, `best_per` the lowest rate so far."""
        self._meter = Meter(total, first_step, self._clock(), best_per)
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
        if self._meter and self._meter.step >= self._meter.total:
            self._meter.phase = "done"
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
