"""How an update is divided among cores and micro-steps: the same shape for every rank.

In: the configuration, the group size of the data, and the number of ranks. Out: a `BatchPlan`, or an error that says
which numbers do not go together. A core's batch is whole groups, or, where that is too much for its memory, an equal
part of one: groups are dealt to slots, and a slot is one micro-step or is cut into several.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xla_b2t.config import Config
from xla_b2t.data.groups import Batch, Bucket
from xla_b2t.errors import UserError

_MOST_AHEAD = 8
"""Batches: more would only put off the moment when a reader that is too slow shows."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch in groups.

    Attributes:
        num_ranks: R.
        slots_per_update: slots that one rank fills in an update.
        group_size: trials a group.
        groups_per_update: groups of one update over all ranks and slots.
        groups_per_slot: groups that one slot takes; those beyond `groups_per_update` are empty.
        groups_per_validation_slot: groups that one rank decodes at once.
        pieces: micro-steps that one slot is cut into; more than 1 only where a slot is one group.
    """

    num_ranks: int
    slots_per_update: int
    group_size: int
    groups_per_update: int
    groups_per_slot: int
    groups_per_validation_slot: int
    pieces: int = 1

    @property
    def accumulation(self) -> int:
        """Micro-steps an update."""
        return self.slots_per_update * self.pieces

    @property
    def global_batch(self) -> int:
        """Trials an update."""
        return self.groups_per_update * self.group_size

    @property
    def batch_size(self) -> int:
        """Trials a core and micro-step, empty ones included: B of the compiled step."""
        return self.groups_per_slot * self.group_size // self.pieces

    @property
    def validation_batch_size(self) -> int:
        """Trials a core decodes at once."""
        return self.groups_per_validation_slot * self.group_size

    @property
    def idle_share(self) -> float:
        """Share of the slots that no group can fill."""
        return 1 - self.groups_per_update / (self.groups_per_slot * self.num_ranks * self.slots_per_update)

    def in_words(self) -> str:
        """The batch of a core beside the batch of all, and what of it is wasted."""
        idle = f"; {self.idle_share:.0%} of the slots are empty, more groups or fewer ranks would fill them"
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks} x {self.micro_steps_in_words()}: {self.global_batch} trials an update" + (
            idle.replace("%", " %") if self.idle_share else ""
        )

    def micro_steps_in_words(self) -> str:
        """The batch of a core alone."""
        trials = "1 trial" if self.batch_size == 1 else f"{self.batch_size} trials"
        return trials + (f" x {self.accumulation} micro-steps" if self.accumulation > 1 else "")

    def smaller(self) -> "BatchPlan | None":
        """The same update in micro-steps of about half as many trials; None where they are single trials already.

        The groups of an update stay, and with them the trials that count for an epoch, a learning rate, a gradient.
        It is the plan of a run that is configured so from the start.
        """
        groups_of_rank = -(-self.groups_per_update // self.num_ranks)
        if self.groups_per_slot > 1:
            groups_per_slot = -(-self.groups_per_slot // 2)
            slots = -(-groups_of_rank // groups_per_slot)
            return replace(self, groups_per_slot=groups_per_slot, slots_per_update=slots)
        trials = smaller_batch(self.batch_size)
        if trials is None:
            return None
        return replace(self, slots_per_update=groups_of_rank, pieces=self.group_size // trials)

    def at_most(self, batch_size: int) -> "BatchPlan":
        """The same update in micro-steps of no more than so many trials, at least 1."""
        plan = self
        while plan.batch_size > batch_size:
            smaller = plan.smaller()
            assert smaller is not None, "a batch of more than one trial can be divided"
            plan = smaller
        return plan

    def as_keys(self) -> str:
        """What to set to begin with this plan; "" where only falling back leads to it."""
        if self.batch_size * self.accumulation * self.num_ranks == self.global_batch:
            return f"--set train.batch_size={self.batch_size} --set train.accumulation={self.accumulation}"
        if self.pieces == 1:
            return f"--set train.global_batch={self.global_batch} --set train.accumulation={self.accumulation}"
        return ""

    def cut(self, slot: Batch) -> Iterator[Batch]:
        """The micro-steps that a slot is cut into, in order."""
        return cut_batch(slot, self.batch_size)


def smaller_batch(trials: int) -> int | None:
    """The largest number of trials below this one into which it can be cut evenly; None below a single trial."""
    if trials == 1:
        return None
    return trials // next(factor for factor in range(2, trials + 1) if trials % factor == 0)


def batch_at_most(trials: int, most: int) -> int:
    """The same by steps, until it is no more than `most`, which is at least 1."""
    while trials > most:
        trials = smaller_batch(trials) or 1
    return trials


def cut_batch(batch: Batch, trials: int) -> Iterator[Batch]:
    """Cuts a batch along B, without a copy.

    Args:
        batch: as read.
        trials: of each part; the batch is a multiple of it.
    """
    size = len(batch.valid_B)
    assert size % trials == 0, "a batch is cut evenly"
    if size == trials:
        yield batch
        return
    for start in range(0, size, trials):
        yield Batch(**{name: column[start : start + trials] for name, column in vars(batch).items()})


def longest_batch_bytes(trials: int, buckets: Sequence[Bucket], num_features: int) -> int:
    """Bytes of a batch of the longest bucket, as the host holds it: bf16 features, int32 labels and four counts."""
    longest = max(buckets, key=lambda bucket: bucket.input_bins)
    return trials * (2 * longest.input_bins * num_features + 4 * longest.label_slots + 4 * 4 + 1)


def batches_ahead(prefetch_mb: int, batch_bytes: int) -> int:
    """Batches that are kept ready on the host, and as many again on the core.

    Args:
        prefetch_mb: `data.prefetch_mb`, of 10^6 bytes.
        batch_bytes: of a batch of the longest bucket, since any may be next.
    """
    return min(max(prefetch_mb * 10**6 // batch_bytes, 1), _MOST_AHEAD)


def plan_batches(config: Config, group_size: int, num_ranks: int) -> BatchPlan:
    """Fits `train.batch_size`, `train.global_batch` and `train.accumulation` to the ranks and the groups.

    Raises:
        UserError: a batch that is neither whole groups nor an equal part of one, or both sizes given and not agreeing.
    """
    train = config.train
    validation_batch = config.validation.batch_size
    is_part = 0 < train.batch_size < group_size and group_size % train.batch_size == 0
    for key, size in (
        ("train.batch_size", 0 if is_part else train.batch_size),
        ("train.global_batch", train.global_batch),
        ("validation.batch_size", validation_batch),
    ):
        if size % group_size:
            parts = " or a number that divides it" if key == "train.batch_size" else ""
            raise UserError(
                f"{key} is {size}, the data was pre-batched in groups of {group_size} trials",
                key,
                f"use a multiple of {group_size}{parts}, or pre-batch again with --group-size",
            )
    micro_steps = num_ranks * train.accumulation
    if train.batch_size and train.global_batch and train.batch_size * micro_steps != train.global_batch:
        raise UserError(
            f"train.batch_size {train.batch_size} x {num_ranks} ranks x accumulation {train.accumulation} is "
            f"{train.batch_size * micro_steps}, train.global_batch is {train.global_batch}",
            "train.batch_size, train.global_batch",
            "give one of them and set the other to 0",
        )
    if not train.batch_size and not train.global_batch:
        raise UserError(
            "neither a batch size a core nor a global batch is given", "train.batch_size", "set train.batch_size"
        )
    pieces = group_size // train.batch_size if is_part else 1
    if train.accumulation % pieces:
        raise UserError(
            f"train.batch_size is {train.batch_size}, which cuts a group of {group_size} trials into {pieces} "
            f"micro-steps; train.accumulation is {train.accumulation}",
            "train.accumulation",
            f"use a multiple of {pieces}",
        )
    slots = micro_steps // pieces
    groups = train.global_batch // group_size or train.batch_size * micro_steps // group_size
    per_slot = -(-groups // slots)
    per_validation_slot = validation_batch // group_size or per_slot
    return BatchPlan(num_ranks, train.accumulation // pieces, group_size, groups, per_slot, per_validation_slot, pieces)
