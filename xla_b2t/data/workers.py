"""Processes that work through tasks, and that may die without taking the conversion along unexplained.

In: a function of a module and its tasks. Out: results as they come, and word of what each is at. A damaged file can
crash the HDF5 library, and HDF5 has one lock a process: so work on files is spread over processes, and a death is an
error that names the file. What the tasks are is left to who gives them.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from xla_b2t.errors import UserError

At = Callable[[str, int], None]
"""Called with the file that is gone on with before, and with what was read of it in bytes after, each trial."""

Function = Callable[[Any, At], Any]


class Workers:
    """So many processes, started when there is something to do; 0 works in this process.

    Args:
        number: of processes, at least 0.
        patience_s: a worker that says nothing for so long, which is what it takes for a trial, ends the conversion.
    """

    def __init__(self, number: int, patience_s: float = 600):
        self._number, self._patience_s = number, patience_s
        self._silent_since: dict[Connection, float] = {}
        self._processes: dict[Connection, Any] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            process.terminate()
            process.join()
            connection.close()
        self._processes.clear()

    def run(self, function: Function, tasks: Sequence[Any], at: At) -> Iterator[tuple[int, Any]]:
        """Gives the place of each task and its result, in the order in which they are finished.

        Args:
            function: called with a task and an `At`; found by its name in another process.
            tasks: picklable.
            at: called here with what the function calls its own with.

        Raises:
            UserError: that of a task, or a process that died.
        """
        if not self._number:
            for place, task in enumerate(tasks):
                yield place, function(task, at)
            return
        while len(self._processes) < min(self._number, len(tasks)):
            self._start()
        to_do = list(enumerate(tasks))[::-1]
        busy: dict[Connection, tuple[int, str]] = {}
        idle = list(self._processes)
        while to_do or busy:
            while to_do and idle:
                connection = idle.pop()
                place, task = to_do.pop()
                busy[connection] = place, ""
                self._send(connection, (function, task))
            for connection in self._that_spoke(busy):
                place, where = busy[connection]
                try:
                    kind, *content = connection.recv()
                except (EOFError, OSError):
                    raise self._death(connection, where) from None
                if kind == "at":
                    path, done_bytes = content
                    busy[connection] = place, path
                    at(path, done_bytes)
                elif kind == "error":
                    raise content[0]
                elif kind == "fault":
                    raise RuntimeError(f"a worker failed at {where}:\n{content[0]}")
                else:
                    del busy[connection]
                    idle.append(connection)
                    yield place, content[0]

    def _that_spoke(self, busy: dict[Connection, tuple[int, str]]) -> list[Connection]:
        """Waits for word from any of them, but not for ever: a damaged file can keep HDF5 busy without end."""
        now = time.monotonic()
        spoke = wait(list(busy), timeout=self._patience_s / 10)
        self._silent_since = {connection: self._silent_since.get(connection, now) for connection in busy}
        self._silent_since |= dict.fromkeys(spoke, time.monotonic())
        for connection, (_, where) in busy.items():
            if time.monotonic() - self._silent_since[connection] > self._patience_s:
                raise UserError(
                    f"a worker has been at one trial for {self._patience_s:g} s",
                    where or "before its first file",
                    "the file is damaged, or its disk is gone: copy or download it again, or move its session away",
                )
        return spoke

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._processes[ours] = process

    def _send(self, connection: Connection, content: Any) -> None:
        try:
            connection.send(content)
        except OSError:
            raise self._death(connection, "") from None

    def _death(self, connection: Connection, where: str) -> UserError:
        process = self._processes[connection]
        process.join()
        code = process.exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            fix = "see whether memory has run out, give fewer --workers, and run xla_b2t prebatch again"
        else:
            fix = "copy or download the file again, or move its session away"
        return UserError(f"a worker died ({how})", where or "before its first file", fix)


def _work(connection: Connection) -> None:
    # Ctrl-C reaches every process of a terminal; the parent alone answers it, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def at(path: str, done_bytes: int) -> None:
        connection.send(("at", path, done_bytes))

    try:
        while True:
            function, task = connection.recv()
            try:
                result = function(task, at)
            except UserError as error:
                connection.send(("error", error))
            except Exception:  # nothing is swallowed: the parent raises it, with this traceback and the file
                connection.send(("fault", traceback.format_exc()))
            else:
                connection.send(("done", result))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
