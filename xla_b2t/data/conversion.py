"""The folder that a conversion writes to: what is in it from before, and what that was made from.

In: a source, settings, a folder. Out: whether its groups are those that would be made, parts that an interrupted run
finished, a folder that is ready to be written to. Making groups is left to `prebatch`.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_b2t.data.group_format import INDEX, MANIFEST, SOURCE
from xla_b2t.data.group_writer import Part, read_part
from xla_b2t.data.trials import Source
from xla_b2t.errors import UserError

_OURS = re.compile(r"(report\.json|source\.json|index\.h5|(train|val|test)(-\d{4,})?\.h5)(\.partial)?")
_NAMED = 3
"""Differences that a message names; the rest are counted."""


def describe_source(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """What groups are made from: settings, and of each file of the source its size and time of change."""
    files = []
    for file in source.files:
        try:
            about = Path(file.path).stat()
        except OSError as error:
            raise UserError(f"the file is gone: {error.strerror}", file.path, "run xla_b2t prebatch again") from None
        name = str(Path(file.path).relative_to(source.folder))
        files.append({"file": name, "bytes": about.st_size, "mtime_ns": about.st_mtime_ns})
    return {"settings": settings, "files": files, "ignored": list(source.ignored)}


def read_description(out: Path) -> dict[str, Any] | None:
    """What the groups in a folder were made from, as far as that is known."""
    try:
        made_from = json.loads((out / SOURCE).read_text(encoding="utf-8"))
        {file["file"] for file in made_from["files"]}
        return made_from if isinstance(made_from["settings"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def differences(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """What has changed, in words; nothing when it is the same."""
    if before is None:
        return [f"what it was made from is not known (no {SOURCE})"]
    found = []
    for key in sorted({*before["settings"], *now["settings"]}):
        old, new = before["settings"].get(key), now["settings"].get(key)
        if old != new:
            found.append(f"{key} was {old} and is {new}")
    of_before, of_now = ({file["file"]: file for file in made["files"]} for made in (before, now))
    for name in sorted({*of_before, *of_now}):
        if name not in of_now:
            found.append(f"{name} is gone")
        elif name not in of_before:
            found.append(f"{name} is new")
        elif of_before[name] != of_now[name]:
            found.append(f"{name} was changed")
    if not found and before != now:
        found.append("other files lie in the source")
    return found


def in_words(changes: Sequence[str]) -> str:
    """The first changes, and how many more there are."""
    more = len(changes) - _NAMED
    return "; ".join(changes[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def refuse_foreign(out: Path) -> None:
    """Raises a UserError for a folder that holds anything but groups, and for what is no folder."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError("this is a file, expected a folder to write groups to", str(out), "give another folder")
    foreign = sorted(file.name for file in out.iterdir() if not _OURS.fullmatch(file.name))
    if foreign:
        raise UserError(
            f"the folder holds other things: {', '.join(foreign[:3])}", str(out), "give a folder of its own"
        )


def finished_parts(out: Path, names: Sequence[str], conversion: str) -> dict[str, Part]:
    """The parts of this very conversion that an interrupted run finished, by name."""
    parts = {name: read_part(out / name, conversion) for name in names if (out / name).is_file()}
    return {name: part for name, part in parts.items() if part is not None}


def prepare_folder(out: Path, kept: Sequence[str], needed_bytes: int) -> None:
    """Makes the folder and removes what is of another conversion.

    Raises:
        UserError: it cannot be made, or there is too little room.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder cannot be made: {error.strerror}", str(out), "choose another folder") from None
    # The manifest goes first: from here until the new one, nobody takes the folder for complete.
    for path in sorted(out.iterdir(), key=lambda path: path.name != MANIFEST):
        if path.name not in kept and path.name != SOURCE:
            path.unlink(missing_ok=True)
    (out / INDEX).unlink(missing_ok=True)
    free = shutil.disk_usage(out).free
    if free < needed_bytes:
        raise UserError(
            f"the groups need {needed_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            str(out),
            "make room, or choose another folder",
        )
