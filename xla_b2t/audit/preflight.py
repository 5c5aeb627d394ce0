"""The preflight of a run: three looks before its first step.

In: the configuration, the number of ranks, and what is resumed. Out: a `Report`. It needs no weights in memory, no data
but the groups' metadata, and no TPU; it holds no chip, so it may run where ranks will start right after it.

The numbers that must agree are looked at here (`inventory.py`), meanwhile the tensors, the operations and the graphs in
a process of their own (`child.py`).
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xla_b2t import config as configuration
from xla_b2t.audit.findings import Finding, Report
from xla_b2t.config import Config
from xla_b2t.errors import UserError
from xla_b2t.xla.tracing_process import LOG, tracing_process

if TYPE_CHECKING:
    from xla_b2t.audit.resume import Resumed

_LIMIT_SECONDS = 600
_NOTHING_TO_LOOK_AT = "model"
"""The kind of finding of a process that could open no groups or make no model."""


def preflight(
    config: Config,
    num_ranks: int,
    resumed: "Resumed | None" = None,
    given: Callable[[str], str] | None = None,
) -> Report:
    """Looks at a run, at everything that can be looked at.

    Args:
        config: the run's configuration.
        num_ranks: ranks that will be started.
        resumed: the run that is gone on with, None for a new one.
        given: tells of a key of the configuration where it was given.

    Raises:
        UserError: a look did not end.
        RuntimeError: a look failed by a fault of ours; its last words are in the message.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {"config": configuration.dumps(config), "num_ranks": num_ranks}
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        with tracing_process("xla_b2t.audit.child", folder) as child:
            from xla_b2t.audit.inventory import numbers

            with contextlib.redirect_stdout(sys.stderr):  # a user's file may print; stdout is for the result
                findings = numbers(config, num_ranks, resumed, given)
            report = _report(child, folder, config)
    # What keeps the other process from looking is, as a rule, what was found here.
    others = [finding for finding in report.findings if not (findings and finding.kind == _NOTHING_TO_LOOK_AT)]
    seconds = round(time.monotonic() - began, 2)
    return replace(report, findings=(*findings, *others), seconds=seconds)


def _report(child: subprocess.Popen, folder: Path, config: Config) -> Report:
    try:
        code = child.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the preflight did not end within {_LIMIT_SECONDS} s",
            config.model.factory or config.model.name,
            "look in the model for a loop that does not end, or for a very long one over time",
        ) from None
    log = (folder / LOG).read_text(errors="replace")
    if code == 0:
        return msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    if code > 0:
        raise RuntimeError(f"the preflight failed with {code}:\n{log[-4000:]}")
    found = folder / "found.json"
    before = msgspec.json.decode(found.read_bytes(), type=tuple[Finding, ...]) if found.exists() else ()
    return Report((*before, _died(folder / "line.txt", -code, log)))


def _died(line_file: Path, number: int, log: str) -> Finding:
    """torch_xla ends the process where a value is asked for that a placeholder does not have."""
    from xla_b2t.audit.lines import line_of_dump

    line = line_of_dump(log) or (line_file.read_text(errors="replace").strip() if line_file.exists() else "")
    words = [text.partition("Check failed: ")[2] for text in log.splitlines() if "Check failed: " in text]
    found = f"an operation ended the process that traced it with {signal.Signals(number).name}"
    return Finding(
        "host-read",
        "step",
        line or "forward",
        found + (f": {words[0]}" if words else ""),
        "operations of the core, which need no value on the host",
        "replace the operation on this line (or the one whose gradient it has) by others that torch_xla lowers",
    )
