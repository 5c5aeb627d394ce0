"""What a run's log says of some updates: sums that were made on the core, read once, and their means."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks since they were last started anew."""

    objective: float
    loss: float
    trials: float
    gradient_norm: float
    updates: float

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
