"""How far a conversion is, on stderr: a bar in a terminal, a line a stage elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown_progress() -> Iterator[Callable[..., None]]:
    """Gives a function to call with what is being done, how many are done, how many there are, and bytes done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield _say_when_done
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[done_mb]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def update(stage: str, done: int, total: int, done_bytes: int = 0) -> None:
            done_mb = f"{done_bytes / 1e6:,.0f} MB" if done_bytes else ""
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, done_mb=done_mb)
            bars.update(tasks[stage], completed=done, done_mb=done_mb)

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


def _say_when_done(stage: str, done: int, total: int, done_bytes: int = 0) -> None:
    if done == total:
        read = f", {done_bytes / 1e6:,.1f} MB" if done_bytes else ""
        print(f"{stage}: {total} of {total}{read}", file=sys.stderr, flush=True)
