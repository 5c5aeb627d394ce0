"""How far a conversion is, on stderr: a bar in a terminal, a line a stage elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function to call with what is being done, how many of them are done, and how many there are."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield _say_when_done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        yield update


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows on stderr, in a terminal, that something is being done that takes a while."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield


def _say_when_done(stage: str, done: int, total: int) -> None:
    if done == total:
        print(f"{stage}: {total} of {total}", file=sys.stderr, flush=True)
