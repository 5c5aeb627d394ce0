"""What a run's log says of some updates: sums that were made on the core, read once, and their means."""

from dataclasses import dataclass

import torch

NUM_TOTALS = 7


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks since they were last started anew, of the updates that were taken.

    An update is skipped, on all ranks alike, where its objective or its gradient is not finite.

    Attributes:
        updates: taken.
        skipped: not taken.
        skipped_in_a_row: up to the last update, from whenever they began.
    """

    objective: float
    loss: float
    trials: float
    gradient_norm: float
    updates: float
    skipped: float = 0.0
    skipped_in_a_row: float = 0.0

    @property
    def mean_objective(self) -> float:
        """Mean over trials of what is minimised: all heads' losses, weighted, and the model's own."""
        return self.objective / max(self.trials, 1.0)

    @property
    def mean_loss(self) -> float:
        """Mean CTC loss of a trial by the main scores, in nats: what validation measures."""
        return self.loss / max(self.trials, 1.0)

    @property
    def mean_norm(self) -> float:
        """Mean global norm of the gradient, before clipping."""
        return self.gradient_norm / max(self.updates, 1.0)


def is_finite(number: torch.Tensor) -> torch.Tensor:
    """Neither NaN nor infinite: bool, 0-d, not read. `torch.isfinite` compares with a float64 on XLA."""
    return number.abs() < torch.full_like(number, float("inf"))


def add_up(totals_N: torch.Tensor, sums: torch.Tensor, is_taken: torch.Tensor, keep: torch.Tensor) -> None:
    """Adds an update to the totals on the core, or that it was skipped; nothing is read.

    Args:
        totals_N: (NUM_TOTALS,) float32, in the order of `Totals`.
        sums: of the update, float32: objective, loss, trials, norm of the gradient.
        is_taken: bool, 0-d.
        keep: 0-d, 1 or 0; 0 starts the totals anew, but for what is in a row.
    """
    taken = is_taken.float().reshape(1)
    skipped = 1 - taken
    news = torch.cat([torch.where(is_taken, sums, torch.zeros_like(sums)), taken, skipped, skipped])
    totals_N.mul_(torch.cat([keep.expand(NUM_TOTALS - 1), skipped])).add_(news)
