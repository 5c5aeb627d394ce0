"""Verdicts of the TPU's compiler that were given before, in a folder, since each costs up to a minute.

A file is named by a hash of everything that the verdict depends on. The cache is a convenience: what is damaged in it
counts as not there, a folder that cannot be written to is left alone, and both are said once.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from xla_b2t.files import replacing
from xla_b2t.xla.verdict import FORMAT, Verdict, packed, remembered, unpacked

_LOG = logging.getLogger(__name__)
_SUFFIX = ".verdict"


def default_folder() -> Path:
    """Where the user's caches are.

    Source: XDG Base Directory Specification 0.8, which has relative paths in the variable ignored.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "xla_b2t" / "tpu_compiler"


def key(program: bytes, circumstances: Mapping[str, Any]) -> str:
    """The name of a verdict.

    Args:
        program: as it is compiled, from `settled`.
        circumstances: what else the verdict depends on, as JSON takes it.
    """
    said = json.dumps([FORMAT, circumstances], sort_keys=True).encode()
    return hashlib.sha256(len(said).to_bytes(8, "little") + said + program).hexdigest()


@final
class VerdictCache:
    """The folder.

    Args:
        folder: made when it is first needed.
        limit_bytes: of all files; what was longest not asked for goes first.
    """

    def __init__(self, folder: Path, limit_bytes: int = 2**30):
        self._folder, self._limit_bytes = folder, limit_bytes
        self._has_complained = False

    def find(self, name: str) -> Verdict | None:
        """The verdict of that name (`key`); None if there is none that can be read."""
        path = self._folder / (name + _SUFFIX)
        try:
            verdict = unpacked(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._complain(f"a verdict of the TPU's compiler could not be read, so it is asked again: {path}: {error}")
            return None
        try:
            os.utime(path)
        except OSError:
            pass  # a folder that is only read: nothing is dropped from it either
        return remembered(verdict)

    def keep(self, name: str, verdict: Verdict) -> None:
        """Writes a verdict down."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / (name + _SUFFIX)) as partial:
                partial.write_bytes(packed(verdict))
            self._drop_oldest()
        except OSError as error:
            self._complain(f"the verdicts of the TPU's compiler are not kept: {self._folder}: {error}")

    def _drop_oldest(self) -> None:
        stats = [(path, path.stat()) for path in self._folder.glob(f"*{_SUFFIX}*")]
        total = sum(stat.st_size for _, stat in stats)
        for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns):
            if total <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size

    def _complain(self, text: str) -> None:
        if not self._has_complained:
            _LOG.warning("%s", text)
        self._has_complained = True
