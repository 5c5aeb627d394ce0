"""`summary.json`: the result of a run, or how far it has come. Other tools read it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xla_b2t.errors import UserError
from xla_b2t.files import replacing

FILE_NAME = "summary.json"


@dataclass
class Course:
    """How a run has gone so far; a resumed run goes on from it. Error rates from 0 up.

    Losses are those of the main scores, in nats a trial, as in validation.
    """

    val_per: float | None = None
    best_val_per: float | None = None
    val_per_by_day: dict[str, float] = field(default_factory=dict)
    train_loss_first: float | None = None
    train_loss_last: float | None = None
    skipped_updates: int = 0
    """Not taken, since a loss or a gradient was not finite."""
    largest_batch: int | None = None
    """Trials a core and micro-step, since more ran out of HBM; None where none did. A resumed run asks for no more."""
    largest_validation_batch: int | None = None
    """The same of decoding."""
    limited_under: str = ""
    """The settings that the two were found under; under others they do not hold."""

    def keep_limits(self, settings: str) -> None:
        """Forgets what did not fit a core, unless it was found under these settings."""
        if self.limited_under != settings:
            self.largest_batch = self.largest_validation_batch = None
        self.limited_under = settings

    def result(self) -> dict[str, Any]:
        """What a summary tells of it: all but the limits, which are for a resumed run."""
        limits = ("largest_batch", "largest_validation_batch", "limited_under")
        return {name: value for name, value in asdict(self).items() if name not in limits}

    def log(self, mean_loss: float) -> None:
        """Takes the mean loss of some updates."""
        if self.train_loss_first is None:
            self.train_loss_first = mean_loss
        self.train_loss_last = mean_loss

    def validated(self, per: float, per_by_day: dict[str, float]) -> bool:
        """Takes a validation; True when it is the best so far."""
        is_best = self.best_val_per is None or per < self.best_val_per
        self.val_per, self.val_per_by_day = per, per_by_day
        self.best_val_per = per if is_best else self.best_val_per
        return is_best


def write_summary(run_dir: str | Path, summary: dict[str, Any]) -> None:
    """Writes the file whole: a reader never sees half of it.

    Raises:
        UserError: the disk does not take it.
    """
    try:
        with replacing(Path(run_dir) / FILE_NAME) as path:
            path.write_text(json.dumps(summary, indent=1))
    except OSError as error:
        raise UserError(
            f"the summary cannot be written: {error.strerror}", str(Path(run_dir) / FILE_NAME), "free some space there"
        ) from error


def read_summary(run_dir: str | Path) -> dict[str, Any] | None:
    """What the file holds, None where there is none or it is damaged: nothing depends on it."""
    try:
        return json.loads((Path(run_dir) / FILE_NAME).read_text())
    except (OSError, ValueError):
        return None
