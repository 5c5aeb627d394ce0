"""The live display of a run in a terminal: a bar, and below it the curves of loss and phoneme error rate.

In: a `Meter` that the loop keeps up to date. Out: two lines at the bottom of the terminal, redrawn a few times a second
by a thread of rich, so that time goes on while a step compiles. What the numbers are is left to `meter.py`.
"""

from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from xla_b2t.training.meter import Meter

FRAMES_PER_SECOND = 4
LABEL_WIDTH = 9
"""As wide as the longest phase, so that nothing moves when it changes."""


def open_display(stream: TextIO, meter: Meter, clock: Callable[[], float]) -> Live:
    """Begins to draw; `stop()` leaves the last state on the screen and gives the terminal back.

    Python's own stderr is routed above the display, so that a warning does not tear it.
    """
    console = Console(file=stream)
    live = Live(
        Display(meter, clock, unicode=console.encoding.startswith("utf")),
        console=console,
        refresh_per_second=FRAMES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=True,
    )
    live.start()
    # A rank may be killed at any moment and cannot tidy up: the cursor stays visible, and below the display.
    console.show_cursor(True)
    return live


class Display:
    """Draws a meter as it stands now."""

    def __init__(self, meter: Meter, clock: Callable[[], float], unicode: bool):
        self._meter = meter
        self._clock = clock
        self._unicode = unicode

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[object]:
        meter, now = self._meter, self._clock()
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(width=LABEL_WIDTH)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            Text(meter.phase, style="bold"),
            ProgressBar(total=1.0, completed=meter.share, complete_style="cyan", finished_style="green"),
            meter.progress_text(),
            Text(meter.left_text(now), style="dim"),
        )
        yield bar
        yield self._numbers(options.max_width)
        yield Text()

    def _numbers(self, width: int) -> Text:
        """The second line; in a narrow terminal the curves go first, then the speed."""
        meter = self._meter
        curve_width = (width - 62) // 2 if self._unicode else 0
        line = Text(" " * (LABEL_WIDTH + 2), no_wrap=True, overflow="ellipsis")
        if not meter.trials_per_second and not meter.losses.points:
            return line.append("each length of trial compiles once", style="dim")
        if meter.losses.points:
            line.append("loss ", style="dim").append(f"{meter.losses.last:.3f} ", style="bold")
            line.append(meter.losses.sparkline(min(curve_width, 24)) + "   ", style="yellow")
        if meter.pers.points:
            line.append("val PER ", style="dim").append(f"{100 * meter.pers.last:.1f} % ", style="bold")
            line.append(meter.pers.sparkline(min(curve_width, 16)), style="green")
            if meter.pers.lowest < meter.pers.last:
                line.append(f" best {100 * meter.pers.lowest:.1f} %", style="dim")
            line.append("   ")
        if width >= 70:
            line.append(f"{meter.trials_per_second:,.0f}", style="bold").append(" trials/s", style="dim")
        return line
