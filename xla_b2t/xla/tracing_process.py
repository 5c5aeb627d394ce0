"""A process that does not outlive the one that started it, and one that traces steps.

In: a module to run and what it is given. Out: the process. It ends with the one that started it, however that ends.
What the two say to each other is left to them.

Tracing needs a process, since torch_xla must be imported for that under an environment of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from xla_b2t.xla.trace_environment import ENVIRONMENT

LOG = "log.txt"
"""What the process wrote to stdout and stderr, in its folder."""


@contextlib.contextmanager
def tracing_process(module: str, folder: Path) -> Iterator[subprocess.Popen]:
    """Starts `python -m MODULE FOLDER PIPE`, ready to trace; the rest as of `child_process`.

    Args:
        module: calls `end_with_parent` with the number of the pipe.
        folder: of both.
    """
    with child_process(module, [str(folder)], ENVIRONMENT, folder / LOG) as child:
        yield child


@contextlib.contextmanager
def child_process(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen]:
    """Starts `python -m MODULE ARGUMENT... PIPE`; it is gone when this ends, and when this one does, however it does.

    Args:
        module: calls `end_with_parent` with the number of the pipe.
        arguments: of the module.
        environment: what differs from this process's.
        log: a file for what it writes to stdout and stderr.
    """
    theirs, ours = os.pipe()
    command = [sys.executable, "-m", module, *arguments, str(theirs)]
    with open(log, "wb") as file:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[theirs],
        )
    os.close(theirs)
    try:
        with _ended_by_sigterm():
            yield child
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def is_running(child: subprocess.Popen, wait_seconds: float) -> bool:
    """Whether the process goes on, after waiting so long for its end."""
    try:
        child.wait(wait_seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def end_with_parent(pipe: int) -> None:
    """In the process: from now on it ends when the other end of the pipe is closed, so with its parent."""
    threading.Thread(target=_follow, args=(pipe,), daemon=True).start()


def _follow(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written to it
    os._exit(1)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Meanwhile SIGTERM ends this process as an exception does, with everything tidied up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
