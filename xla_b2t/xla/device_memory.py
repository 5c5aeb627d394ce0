"""How much of a core's memory is in use, where the device says so.

A CPU does not say it, and torch_xla has changed how it is said, so a reading may be None and nothing may rest on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm

_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """One reading, in bytes. `peak_bytes` is the most since the process began, None where the device keeps no count."""

    used_bytes: int
    limit_bytes: int
    peak_bytes: int | None = None

    def in_words(self, planned_bytes: int | None = None) -> str:
        """The reading beside what was planned, if it was."""
        peak = "" if self.peak_bytes is None else f", {self.peak_bytes / _GIB:.1f} at its peak"
        planned = "" if planned_bytes is None else f" (planned {planned_bytes / _GIB:.2f})"
        return f"HBM in use {self.used_bytes / _GIB:.1f} of {self.limit_bytes / _GIB:.1f} GiB{peak}{planned}"


def _read() -> Mapping[str, Any]:
    return xm.get_memory_info(torch_xla.device())


def read_memory_use(read: Callable[[], Mapping[str, Any]] = _read) -> MemoryUse | None:
    """A reading of this rank's core; None where there is none to be had.

    Args:
        read: gives the device's numbers by their names. Known are those of torch_xla since 2.4 (`bytes_used`,
            `bytes_limit`, and since 2.6 `peak_bytes_used`), and those before (`kb_total`, `kb_free`).

    Source: torch_xla.core.xla_model.get_memory_info; pytorch/xla PR 7086 and 8265.
    """
    try:
        found = read()
        if "bytes_used" in found:
            peak = found.get("peak_bytes_used")
            return MemoryUse(int(found["bytes_used"]), int(found["bytes_limit"]), None if peak is None else int(peak))
        total = 1024 * int(found["kb_total"])
        return MemoryUse(total - 1024 * int(found["kb_free"]), total)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None  # unimplemented on this device or in this torch_xla, or by other names: it is for people only
