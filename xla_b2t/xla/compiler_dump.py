"""What libtpu writes to files while it compiles: where every value lies in memory, and how long it is needed.

In: a folder that libtpu was told to write to. Out: the compiled program and its buffer assignment, as text. Both are
there for a refused program too, whose compilation ends later than that. `memory/buffers.py` reads the assignment.

Source: of openxla/xla, the flags in xla/xla.proto (DebugOptions.xla_dump_to, xla_dump_hlo_as_text) and the text in
BufferAssignment::ToVerboseString, xla/service/buffer_assignment.cc.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_ASSIGNMENT = "*.after_optimizations-buffer-assignment.txt"
_TEXT = "*.after_optimizations.txt"
_RANGE = re.compile(r"    .+:\d+-\d+$")


def writing_to(folder: Path) -> str:
    """The XLA_FLAGS of a process in which libtpu is to write there."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text"


def taken(folder: Path) -> tuple[str, str]:
    """The compiled text and the buffer assignment of the program that was compiled last, and an empty folder again.

    Returns:
        Two texts; "" for one that was not written. Of the assignment only what is in memory for more than an
        instruction: allocations, the values in them, the ranges in which those are needed.
    """
    text, assignment = (_newest(folder.glob(pattern)) for pattern in (_TEXT, _ASSIGNMENT))
    empty(folder)
    return text, "\n".join(_condensed(assignment.splitlines()))


def empty(folder: Path) -> None:
    """Removes what is there, such as of a compilation that did not end."""
    for path in sorted(folder.rglob("*"), reverse=True):  # a file comes after its folder
        path.rmdir() if path.is_dir() else path.unlink()


def _newest(paths: Iterable[Path]) -> str:
    found = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    return found[-1].read_text() if found else ""


def _condensed(lines: Iterable[str]) -> Iterator[str]:
    is_kept = False
    for line in lines:
        if line.startswith("allocation "):
            is_kept = "thread-local" not in line
        elif not line.startswith(" value: ") and not _RANGE.match(line):
            continue
        if is_kept or line.startswith("    "):
            yield line
