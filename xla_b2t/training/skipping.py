"""Updates that were skipped, since a loss or a gradient was not finite: told, and the end of a run of nothing else.

In: totals that were read anyway, alike on all ranks. Out: a line, an event, or an error with the trials of those
updates in a file, to look at. That the weights stay as they are is left to the step, on the core.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.schedule import Schedule
from xla_b2t.errors import UserError
from xla_b2t.files import replacing
from xla_b2t.training.totals import Totals

FILE_NAME = "skipped.json"
"""In the folder `crash` of a run."""

WHY = "loss or gradient not finite"


def in_words(totals: Totals, skipped_before: int) -> str:
    """What people are told of the updates since the last reading; "" where all were taken."""
    if not totals.skipped:
        return ""
    number = f"{totals.skipped:,.0f} update{'s' if totals.skipped > 1 else ''} skipped"
    return f"{number}, {WHY}" + (f"; {skipped_before + totals.skipped:,.0f} so far" if skipped_before else "")


def skipped_steps(totals: Totals, step: int) -> range:
    """Numbers, from 0, of the updates that were skipped in a row up to the last of `step` updates."""
    return range(step - int(totals.skipped_in_a_row), step)


def save_trials(run_dir: str | Path, steps: Sequence[int], schedule: Schedule, reader: GroupReader) -> Path:
    """Writes down which trials the updates had, so that they can be looked at.

    Args:
        run_dir: of the run.
        steps: numbers of the updates, from 0.
        schedule: says which groups they took.
        reader: of those groups.

    Raises:
        UserError: the disk does not take the file.
    """
    updates = []
    for step in steps:
        update = schedule.update(step)
        names = [reader.read_small(group)["trial_ids"][reader.index.valid_GB[group]] for group in update.groups]
        updates.append({"step": step + 1, "trials": [name.decode() for of_group in names for name in of_group]})
    path = Path(run_dir) / "crash" / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps({"why": WHY, "updates": updates}, indent=1))
    except OSError as error:
        raise UserError(
            f"{len(updates)} updates in a row were skipped, {WHY}; their trials cannot be written: {error.strerror}",
            str(path),
            "free some space there, and go on with --resume or a lower optimizer.rate.peak",
        ) from error
    return path


def too_many(totals: Totals, step: int, file: str, can_go_on: bool) -> UserError:
    """The end of a run.

    Args:
        totals: as read.
        step: updates done, the skipped ones too.
        file: with the trials.
        can_go_on: whether there is a checkpoint.
    """
    back = "go on from the last checkpoint with --resume and a lower optimizer.rate.peak, or " if can_go_on else ""
    return UserError(
        f"{totals.skipped_in_a_row:.0f} updates in a row up to step {step} had a loss or a gradient that is not finite",
        file,
        f"look at the trials listed there; {back}begin anew with a lower optimizer.rate.peak",
    )
