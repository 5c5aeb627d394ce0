"""How often a run was begun again by itself, so that one that never comes any further does not go on for ever.

In: the run directory and the step of its latest checkpoint. Out: `restarts.json` there, and an error where too many
restarts in a row found no checkpoint newer than the last one did.
"""

import json
from pathlib import Path

from xla_b2t.errors import UserError
from xla_b2t.files import replacing

FILE_NAME = "restarts.json"


def count_restart(run_dir: str | Path, step: int, most_in_a_row: int) -> int:
    """Counts a start by `--resume auto`.

    Args:
        run_dir: of the run; it may not exist yet.
        step: of its latest checkpoint; 0 without.
        most_in_a_row: restarts at one step; the next is refused.

    Returns:
        Restarts of the run in all; 0 at its first start.

    Raises:
        UserError: there were too many at this step, or the file cannot be written.
    """
    path = Path(run_dir) / FILE_NAME
    before = _read(path)
    if before is None:
        total, in_a_row = 0, 0
    else:
        total = before["total"] + 1
        in_a_row = before["in_a_row"] + 1 if before["step"] == step else 1
    if in_a_row > most_in_a_row:
        raise UserError(
            f"the run was started again {most_in_a_row} times in a row without coming further than step {step:,}",
            str(path),
            f"see why in {Path(run_dir) / 'crash'} or the log; then go on by hand with --resume, or remove {path.name}",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps({"step": step, "in_a_row": in_a_row, "total": total}))
    except OSError as error:
        raise UserError(
            f"the run directory cannot be written: {error.strerror}", str(path), "free some space there"
        ) from None
    return total


def forget_restarts(run_dir: str | Path) -> None:
    """Somebody looked: the count begins anew."""
    path = Path(run_dir) / FILE_NAME
    if path.is_file():
        path.unlink()


def _read(path: Path) -> dict[str, int] | None:
    try:
        found = json.loads(path.read_text())
        return {name: int(found[name]) for name in ("step", "in_a_row", "total")}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing depends on it but the count
