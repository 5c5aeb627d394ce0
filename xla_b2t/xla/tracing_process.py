"""A process that traces steps, since torch_xla must be imported for that under an environment of its own.

In: a module to run, and a folder for what goes in and comes out. Out: the process. It ends with the one that started
it, however that ends. What the two say to each other is left to them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from xla_b2t.xla.trace_environment import ENVIRONMENT

LOG = "log.txt"
"""What the process wrote to stdout and stderr, in its folder."""


@contextlib.contextmanager
def tracing_process(module: str, folder: Path) -> Iterator[subprocess.Popen]:
    """Starts `python -m MODULE FOLDER PIPE`; it is gone when this ends, and when this process ends, however it does.

    Args:
        module: calls `end_with_parent` with the number of the pipe.
        folder: of both.
    """
    theirs, ours = os.pipe()
    command = [sys.executable, "-m", module, str(folder), str(theirs)]
    environment = {**os.environ, **ENVIRONMENT}
    with open(folder / LOG, "wb") as log:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs]
        )
    os.close(theirs)
    try:
        with _ended_by_sigterm():
            yield child
    finally:
        child.kill()
        child.wait()
        os.close(ours)


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
