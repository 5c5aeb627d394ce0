"""The log of a run: what happened at which step, for programs (`events.jsonl`) and for eyes (TensorBoard).

In: a kind, a step and named values. Out: one JSON line each, on disk at once, and TensorBoard scalars. Rank 0 alone
opens a log. What is worth an event is left to the loop.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xla_b2t.errors import UserError

FILE_NAME = "events.jsonl"


class EventLog:
    """Appends to the log of one run; a resumed run continues it.

    Args:
        run_dir: the run directory; it is made when it is missing.
        first_step: the step that this process begins after, so that TensorBoard hides what a lost process wrote later.
        clock: seconds since the epoch.

    Raises:
        UserError: the directory or the disk does not take the log; from `write` and `close` too.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0, clock: Callable[[], float] = time.time):
        # Both take a second to import, and only rank 0 of a run needs them.
        from torch.utils.tensorboard import SummaryWriter

        self._clock = clock
        self._path = Path(run_dir) / FILE_NAME
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab+")  # noqa: SIM115 (open as long as the run)
            self._end_broken_line()
            self._board = SummaryWriter(str(run_dir), purge_step=first_step + 1 if first_step else None)
        except OSError as error:
            raise self._refused(error) from None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one event.

        Args:
            kind: `train`, `val`, ...
            step: updates done.
            **values: JSON values. Numbers become scalars `<kind>/<name>`, and mappings of numbers
                `<kind>/<name>/<key>`. JSON has no NaN and no infinity: they are written as "nan", "inf" and "-inf".
        """
        now = self._clock()
        values = _plain(values)
        event = {"time": round(now, 3), "kind": kind, "step": step, **values}
        try:
            self._file.write((json.dumps(event, allow_nan=False) + "\n").encode())
            self._file.flush()
            for name, number in _scalars(kind, values):
                self._board.add_scalar(name, number, step, walltime=now)
        except OSError as error:
            raise self._refused(error) from None

    def close(self) -> None:
        """Flushes and closes both."""
        try:
            try:
                self._board.close()
            finally:
                self._file.close()
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except UserError:
            # What is on its way came first, often from the same full disk: closing must not replace it.
            if raised is None:
                raise

    def _end_broken_line(self) -> None:
        """A process that was killed may have left half a line: the next event must not be glued to it."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def _refused(self, error: OSError) -> UserError:
        return UserError(
            f"the event log cannot be written: {error.strerror}",
            str(self._path),
            "free space there, or give another run.dir",
        )


def _plain(value: Any) -> Any:
    """The value with nothing in it that JSON cannot say. numpy's scalars have `item` too."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _scalars(name, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
