"""Which line of Python an operation comes from: the user's own, as near to the operation as can be.

In: the stack at hand, or a traceback. Out: `file:line`.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import TracebackType

import torch

_OURS = str(Path(__file__).parents[1])
_AUDIT = str(Path(__file__).parent)
_REHEARSAL = str(Path(__file__).parent / "rehearsal.py")
_TORCH = tuple(f"{Path(torch.__file__).parent.parent / name}/" for name in ("torch", "torch_xla", "functorch"))
_TEXT = (f"{_TORCH[0]}_tensor", f"{_TORCH[0]}utils/_device", f"{_TORCH[0]}overrides")
"""Begins the files of torch between a tensor and its text."""
_PYTHON = sysconfig.get_path("stdlib")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_USERS, _OTHERS, _TRAINERS, _NOBODYS = range(4)


@cache
def _owner(file: str) -> int:
    """Whose a file is, the one to blame first being the smallest."""
    if file.startswith((_AUDIT, "<", *_TORCH)):
        return _NOBODYS
    if file.startswith(_OURS):
        return _TRAINERS
    if file.startswith(_INSTALLED):
        return _OTHERS
    return _NOBODYS if file.startswith(_PYTHON) else _USERS


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor of an installed package, nor of the trainer."""
    return _owner(file) == _USERS


def is_trainers(line: str) -> bool:
    """Whether a `file:line` is of the trainer's own files, which no user wrote."""
    file = line.rpartition(":")[0]
    return bool(file) and _owner(str(Path(file).absolute())) == _TRAINERS


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
    is_torchs = frame is None or frame.f_code.co_filename.startswith(_TORCH)
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


def shown(file: str) -> str:
    """A file's name as the user would type it: relative where it lies below the working directory."""
    return _relative(file, os.getcwd())


@cache
def _relative(file: str, folder: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file


def _best(frames: Iterable[tuple[str, int]]) -> str:
    """Of frames, innermost first, the first of the most to blame; whoever asked for the rehearsal is not."""
    best, where = _NOBODYS, ""
    for file, line in frames:
        if file == _REHEARSAL:
            break
        owner = _owner(file)
        if owner < best:
            best, where = owner, f"{shown(file)}:{line}"
            if best == _USERS:
                break
    return where
