"""Which line of Python an operation comes from: the user's own, as near to the operation as can be.

In: the stack at hand, or a traceback. Out: `file:line`.
"""

import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from xla_b2t.xla.frames import TORCH, TRAINERS, USERS, XLAS, blamed, owner, shown

_AUDIT = str(Path(__file__).parent)
_REHEARSAL = str(Path(__file__).parent / "rehearsal.py")
_TEXT = (f"{TORCH[0]}_tensor", f"{TORCH[0]}utils/_device", f"{TORCH[0]}overrides")
"""Begins the files of torch between a tensor and its text."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor of an installed package, nor of the trainer."""
    return owner(file) == USERS


def is_trainers(line: str) -> bool:
    """Whether a `file:line` is of the trainer's own files, which no user wrote."""
    file = line.rpartition(":")[0]
    return bool(file) and owner(str(Path(file).absolute())) in (TRAINERS, XLAS)


def line_here() -> str:
    """The line that is being run: the innermost one of the user's files; failing that of another package, and then of
    the trainer. "" where there is none."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _best(frames)


def line_that_prints() -> str:
    """The line that turns a tensor into text; "" where torch does so for itself."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_AUDIT, *_TEXT)):
        frame = frame.f_back
    is_torchs = frame is None or frame.f_code.co_filename.startswith(TORCH)
    return "" if is_torchs else line_here()


def line_of_traceback(traceback: TracebackType | None) -> str:
    """The line that an exception comes from, by the same rule."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _best(reversed(frames))


def line_of_dump(text: str) -> str:
    """The user's line in what `faulthandler` wrote of the thread that died; "" where it was in none."""
    thread = text.partition("Current thread")[2].partition("\n\n")[0]
    frames = [(match[1], int(match[2])) for match in _FRAME.finditer(thread)]
    return next((f"{shown(file)}:{line}" for file, line in frames if is_users(file)), "")


def line_of_function(function: object) -> str:
    """The line where a function or method begins."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{shown(code.co_filename)}:{code.co_firstlineno}" if code else ""


def _best(frames: Iterable[tuple[str, int]]) -> str:
    """Of frames, innermost first, the first of the most to blame; whoever asked for the rehearsal is not."""
    found = blamed(itertools.takewhile(lambda frame: frame[0] != _REHEARSAL, frames))
    return f"{shown(found[0])}:{found[1]}" if found else ""
