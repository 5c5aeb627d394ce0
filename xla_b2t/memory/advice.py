"""Which batch to take: the largest that every bucket takes, and the one that leaves an update what it is.

In: functions that say what a bucket needs of a core. Out: batches. Who answers, arithmetic or the compiler, is left to
the caller.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from xla_b2t.data.batch_plan import BatchPlan
from xla_b2t.memory.batch_size import largest

_MOST_TRIALS = 4096
"""No larger batch of a core is looked for."""


@dataclass(frozen=True)
class CoreBatch:
    """What a core works on at once: trials of a micro-step, trials that it decodes, and micro-steps an update."""

    trials: int
    validation_trials: int
    accumulation: int = 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed over micro-steps, which takes other programs and more memory."""
        return self.accumulation > 1

    def of(self, trials: int, accumulation: int = 1) -> "CoreBatch":
        """Another micro-batch, which validation follows where it did."""
        follows = self.trials == self.validation_trials
        return CoreBatch(trials, trials if follows else self.validation_trials, accumulation)


Needs = Callable[[int, CoreBatch], int | None]
"""HBM in bytes that a bucket needs, by its index and the batch; None where it is refused without a figure."""


@dataclass(frozen=True)
class Found:
    """A batch.

    Attributes:
        batch: that every bucket takes.
        is_largest: no larger one is taken by all; False where the search ended before.
    """

    batch: CoreBatch
    is_largest: bool


def largest_batch(
    batch: CoreBatch, group_size: int, buckets: Iterable[int], limit_bytes: int, needs: Needs, expected: Needs
) -> Found | None:
    """The most trials of a core that every bucket takes, in one micro-step; in several where less than a group fits.

    Args:
        batch: configured.
        group_size: trials a group; a batch is some groups, or an equal part of one.
        buckets: their indices, likely the neediest first.
        limit_bytes: what may be needed.
        needs: may take minutes.
        expected: the same, roughly and fast.

    Returns:
        None where no batch of any size is taken.
    """
    buckets, step = list(buckets), group_size
    most = _MOST_TRIALS // step * step
    is_largest = False
    worst = max(buckets, key=lambda bucket: expected(bucket, batch.of(step)) or 0)
    while most >= step:
        few, more = (expected(worst, batch.of(trials)) for trials in (step, 2 * step))
        slope = (more - few) / step
        guess = step + int((limit_bytes - few) / slope) if slope > 0 else step
        search = largest(partial(_need_of, needs, worst, batch), limit_bytes, step, guess, slope, most)
        if not search.batch_size:
            break
        found = batch.of(search.batch_size)
        over = next((bucket for bucket in buckets if not _fits(needs(bucket, found), limit_bytes)), None)
        if over is None:
            return Found(found, is_largest or search.is_bounded)
        worst, most, is_largest = over, search.batch_size - step, True
    for part in (batch.of(trials, step // trials) for trials in range(step - 1, 0, -1) if step % trials == 0):
        if all(_fits(needs(bucket, part), limit_bytes) for bucket in buckets):
            return Found(part, True)
    return None


def same_update(
    configured: BatchPlan, batch: CoreBatch, buckets: Iterable[int], limit_bytes: int, needs: Needs
) -> BatchPlan | None:
    """The configured update in as few micro-steps as every bucket takes; None where not even single trials are.

    Args:
        configured: in as few micro-steps as can be.
        batch: configured.
        buckets, limit_bytes, needs: as of `largest_batch`.
    """
    buckets = list(buckets)
    for plan in _smaller_and_smaller(configured):
        part = batch.of(plan.batch_size, plan.accumulation)
        if all(_fits(needs(bucket, part), limit_bytes) for bucket in buckets):
            return plan
    return None


def _need_of(needs: Needs, bucket: int, batch: CoreBatch, trials: int) -> int | None:
    return needs(bucket, batch.of(trials))


def _fits(needed_bytes: int | None, limit_bytes: int) -> bool:
    return needed_bytes is not None and needed_bytes <= limit_bytes


def _smaller_and_smaller(plan: BatchPlan | None) -> Iterator[BatchPlan]:
    while plan:
        yield plan
        plan = plan.smaller()
