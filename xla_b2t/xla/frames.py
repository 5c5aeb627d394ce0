"""Whose a line of Python is, and which of the lines that called each other is to be shown for an operation.

In: files and lines of calling frames. Out: the user's own line, as near to the operation as can be.
"""

import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_OURS, _AUDIT, _XLA = str(_PACKAGE), str(_PACKAGE / "audit"), str(_PACKAGE / "xla")
_SITE = Path(importlib.util.find_spec("torch").origin).parent.parent  # where it is, without a second to import it
TORCH = tuple(f"{_SITE / name}/" for name in ("torch", "torch_xla", "functorch"))
"""Begins the files of torch."""
_PYTHON = sysconfig.get_path("stdlib")
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
"""Begins the files of installed packages."""
_ANY_INSTALLED = re.compile(r"/(?:site|dist)-packages/(torch(?:_xla)?/|functorch/)?")
"""An environment can be reached by two paths, and a program be traced by one and compiled by the other."""

USERS, OTHERS, TRAINERS, XLAS, NOBODYS = range(5)
"""Owners, the one to blame first being the smallest: of the trainer's own files, those of its XLA package come last."""


@cache
def owner(file: str) -> int:
    """Whose a file is."""
    installed = _ANY_INSTALLED.search(file)
    if file.startswith((_AUDIT, "<", *TORCH)) or (installed and installed[1]):
        return NOBODYS
    if file.startswith(_OURS):
        return XLAS if file.startswith(_XLA) else TRAINERS
    if installed or file.startswith(INSTALLED):
        return OTHERS
    return NOBODYS if file.startswith(_PYTHON) else USERS


def blamed(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Of frames (file, line), innermost first, the first of the most to blame; None where they are nobody's."""
    best, found = NOBODYS, None
    for file, line in frames:
        if owner(file) < best:
            best, found = owner(file), (file, line)
            if best == USERS:
                break
    return found


def shown(file: str) -> str:
    """A file's name as the user would type it: relative where it lies below the working directory."""
    return _relative(file, os.getcwd())


@cache
def _relative(file: str, folder: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file
