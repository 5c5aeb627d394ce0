"""How an update is divided among cores and micro-steps: whole groups, the same shape for every rank.

In: the configuration, the group size of the data, and the number of ranks. Out: a `BatchPlan`, or an error that says
which numbers do not go together.
"""

from dataclasses import dataclass

from xla_b2t.config import Config
from xla_b2t.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """The batch in groups.

    Attributes:
        num_ranks: R.
        accumulation: micro-steps an update.
        group_size: trials a group.
        groups_per_update: groups of one update over all ranks and micro-steps.
        groups_per_slot: groups that one rank takes in one micro-step; slots beyond `groups_per_update` are empty.
        groups_per_validation_slot: groups that one rank decodes at once.
    """

    num_ranks: int
    accumulation: int
    group_size: int
    groups_per_update: int
    groups_per_slot: int
    groups_per_validation_slot: int

    @property
    def global_batch(self) -> int:
        """Trials an update."""
        return self.groups_per_update * self.group_size

    @property
    def batch_size(self) -> int:
        """Trials a core and micro-step, empty slots included: B of the compiled step."""
        return self.groups_per_slot * self.group_size

    @property
    def idle_share(self) -> float:
        """Share of the slots that no group can fill."""
        return 1 - self.groups_per_update / (self.groups_per_slot * self.num_ranks * self.accumulation)

    def in_words(self) -> str:
        """The batch of a core beside the batch of all, and what of it is wasted."""
        micro = f" x {self.accumulation} micro-steps" if self.accumulation > 1 else ""
        idle = f"; {self.idle_share:.0%} of the slots are empty, more groups or fewer ranks would fill them"
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks} x {self.batch_size} trials{micro}: {self.global_batch} trials an update" + (
            idle.replace("%", " %") if self.idle_share else ""
        )


def plan_batches(config: Config, group_size: int, num_ranks: int) -> BatchPlan:
    """Fits `train.batch_size`, `train.global_batch` and `train.accumulation` to the ranks and the groups.

    Raises:
        UserError: a batch that is not whole groups, or both sizes given and not agreeing.
    """
    train = config.train
    validation_batch = config.validation.batch_size
    for key, size in (
        ("train.batch_size", train.batch_size),
        ("train.global_batch", train.global_batch),
        ("validation.batch_size", validation_batch),
    ):
        if size % group_size:
            raise UserError(
                f"{key} is {size}, the data was pre-batched in groups of {group_size} trials",
                key,
                f"use a multiple of {group_size}, or pre-batch again with --group-size",
            )
    slots = num_ranks * train.accumulation
    if train.batch_size and train.global_batch and train.batch_size * slots != train.global_batch:
        raise UserError(
            f"train.batch_size {train.batch_size} x {num_ranks} ranks x accumulation {train.accumulation} is "
            f"{train.batch_size * slots}, train.global_batch is {train.global_batch}",
            "train.batch_size, train.global_batch",
            "give one of them and set the other to 0",
        )
    if not train.batch_size and not train.global_batch:
        raise UserError(
            "neither a batch size a core nor a global batch is given", "train.batch_size", "set train.batch_size"
        )
    groups = train.global_batch // group_size or train.batch_size // group_size * slots
    per_slot = -(-groups // slots)
    per_validation_slot = validation_batch // group_size or per_slot
    return BatchPlan(num_ranks, train.accumulation, group_size, groups, per_slot, per_validation_slot)
