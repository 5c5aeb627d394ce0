"""The process in which a run's step is rehearsed (`preflight.py`): tensors, operations, graphs.

In: a folder with `task.json`. Out: `report.json` in it. A process of its own, because torch_xla must be imported under
an environment that suits tracing, and because an operation that asks for a value that is not there may take the process
with it. What was found until then, and the line of the operation at hand, are kept in `found.json` and `line.txt`.
"""

import faulthandler
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from xla_b2t import config as configuration
from xla_b2t.audit import stored
from xla_b2t.audit.construction import construct
from xla_b2t.audit.findings import Finding, Report, finding_of
from xla_b2t.audit.rehearsal import rehearse
from xla_b2t.config import Config
from xla_b2t.data.selection import open_selected
from xla_b2t.errors import UserError
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training.shapes import Shapes, run_shapes
from xla_b2t.xla.tracing_process import end_with_parent

_LINE_BYTES = 400


@dataclass(frozen=True)
class Task:
    """What is to be rehearsed: the configuration in TOML, and the number of ranks."""

    config: str
    num_ranks: int


def look(config: Config, num_ranks: int, folder: Path) -> Report:
    """Looks at every tensor, operation and graph of a run.

    Where the groups cannot be opened or the model cannot be made there is nothing to look at; that is the one finding.
    """
    try:
        shapes = _shapes(config, num_ranks)
        made = construct(config.model, shapes.sizes)
    except UserError as error:
        return Report((finding_of(error, "model"),))
    arrived = stored.arrival(made, config)
    parameters, buffers = len(list(made.model.parameters())), len(list(made.model.buffers()))
    allowed = stored.exceptions(made.model, config)
    if any(finding.kind in ("lazy", "compiled") for finding in arrived):  # no step of these can be traced
        return Report(tuple(arrived), {"parameters": parameters, "buffers": buffers}, allowed)
    with open(folder / "line.txt", "wb", buffering=0) as file:

        def note(line: str, findings: list[Finding] | None) -> None:
            os.pwrite(file.fileno(), line.ljust(_LINE_BYTES).encode()[:_LINE_BYTES], 0)
            if findings is not None:
                (folder / "found.json").write_bytes(msgspec.json.encode(told_once(arrived, findings)))

        rehearsed = rehearse(made, config, shapes, note)
    checked = {"parameters": parameters, "buffers": buffers, **rehearsed.checked}
    findings = tuple(told_once(arrived, rehearsed.findings))
    return Report(findings, checked, allowed, planned_bytes=rehearsed.planned_bytes)


def _shapes(config: Config, num_ranks: int) -> Shapes:
    """The shapes of a run from its groups' metadata; a group for a batch, where the configuration's cannot be had.

    Raises:
        UserError: as of `open_selected`.
    """
    group_set = open_selected(config.data)
    try:
        return run_shapes(config, group_set, num_ranks)
    except UserError:  # a finding of the look at the numbers; the model can be looked at all the same
        size = group_set.group_size
        return Shapes(sizes_of(group_set), group_set.buckets, num_ranks, size, size)


def told_once(earlier: list[Finding], later: list[Finding]) -> list[Finding]:
    """Both, without what the later look blames on the same line, or sees of a tensor that nobody registered."""
    places = {(finding.kind, finding.where) for finding in earlier}
    is_unregistered = any(finding.kind == "unregistered" for finding in earlier)
    return earlier + [
        finding
        for finding in later
        if (finding.kind, finding.where) not in places and not (finding.kind == "unregistered" and is_unregistered)
    ]


def main(folder: Path, parents_pipe: int) -> None:
    """Reads the task, looks, writes the report; ends when the other end of a pipe is closed, so with its parent."""
    faulthandler.enable()  # an operation that ends the process leaves its line in the log
    end_with_parent(parents_pipe)
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    report = look(configuration.loads(task.config, "config"), task.num_ranks, folder)
    (folder / "report.json").write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
