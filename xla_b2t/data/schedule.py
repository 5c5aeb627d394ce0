"""Who trains on which groups, and when: a pure function of the index of a split, a seed and a step.

In: a `SplitIndex` (the bucket and the days of each group). Out: for any step, the groups of that update; and how an
update is dealt over ranks and micro-steps. Nothing here remembers anything, so resuming is asking for a later step,
and every rank works out the same answer alone. Reading the groups is left to `group_reader.GroupReader`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from xla_b2t.data.groups import SplitIndex
from xla_b2t.errors import UserError

EMPTY = -1
"""The number of a group that is not there: it fills a slot, and reads as zeros with no valid trial."""

_EPOCH_STREAM = 1
_DAYS_STREAM = 2


@dataclass(frozen=True)
class Update:
    """The groups of one optimizer update, all of one bucket; at least one, in the order they are dealt."""

    step: int
    epoch: int
    bucket: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class EvaluationStep:
    """One forward step of every rank: equally many slots each, all of one bucket, `EMPTY` where there is no group."""

    bucket: int
    groups_by_rank: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which groups each update takes.

    `epochs`: every trial exactly once an epoch, in updates of one bucket whose order is shuffled; which groups meet in
    an update is drawn anew each epoch, and where the trials were grouped in several ways (passes), epochs take turns
    with them. The last update of a bucket may hold fewer groups.

    `days`, from all passes: the published recipe in units of groups: a bucket with the probability
    with which a trial drawn by that recipe (a day evenly, then a trial of it evenly) falls into it, then distinct
    days with theirs, then of each day groups with replacement, a group as often as it has trials of the day.

    Args:
        recipe: `epochs` or `days`.
        index: the split that is trained on.
        seed: at least 0.
        groups_per_update: groups over all ranks and micro-steps, at least 1.
        days_per_batch: distinct days in an update under `days`, at least 1; fewer where a bucket has fewer.

    Raises:
        UserError: the split has no group, or a number is out of range.
    """

    recipe: Literal["epochs", "days"]
    index: SplitIndex
    seed: int
    groups_per_update: int
    days_per_batch: int = 4

    def __post_init__(self) -> None:
        if self.recipe not in ("epochs", "days"):
            raise UserError(f"unknown recipe {self.recipe!r}", "data.recipe", "give epochs or days")
        for name, value, least in (
            ("run.seed", self.seed, 0),
            ("groups per update", self.groups_per_update, 1),
            ("data.days_per_batch", self.days_per_batch, 1),
        ):
            if value < least:
                raise UserError(f"{name} is {value}, expected at least {least}", name, f"give {least} or more")
        if len(self.index.bucket_G) == 0:
            raise UserError("there is no group to train on", self.index.where, "run xla_b2t prebatch on more trials")

    @property
    def updates_per_epoch(self) -> int:
        """Updates of the first epoch: each trial is seen once; under `days`, as many groups are drawn as that takes."""
        return int(self._epoch_ends[0])

    def epochs(self, step: int) -> float:
        """Epochs that are done after so many updates; one that has begun counts in part."""
        epoch, position, num_updates = self._place(step)
        return epoch + position / num_updates

    def update(self, step: int) -> Update:
        """The update of a step (0 the first). The same for every rank, in any order of asking."""
        epoch, position, _ = self._place(step)
        if self.recipe == "days":
            return self._draw_days(step, epoch, position)
        return self._take_from_epoch(step, epoch, position)

    @cached_property
    def _passes(self) -> list[np.ndarray]:
        """Groups of each pass."""
        return [np.flatnonzero(self.index.pass_G == number) for number in np.unique(self.index.pass_G)]

    @cached_property
    def _epoch_ends(self) -> np.ndarray:
        """int64, update after the last of each epoch, until the epochs begin anew with the first pass."""
        if self.recipe == "days":
            return np.array([-(-len(self.index.bucket_G) // (len(self._passes) * self.groups_per_update))])
        counts = [np.bincount(self.index.bucket_G[groups]) for groups in self._passes]
        return np.cumsum([np.sum(-(-count // self.groups_per_update)) for count in counts])

    def _place(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, its place in it, and how many updates that epoch has: passes are of unequal length."""
        ends = self._epoch_ends
        turn, rest = divmod(step, int(ends[-1]))
        number = int(np.searchsorted(ends, rest, side="right"))
        begin = int(ends[number - 1]) if number else 0
        return turn * len(ends) + number, rest - begin, int(ends[number]) - begin

    def _take_from_epoch(self, step: int, epoch: int, position: int) -> Update:
        generator = _generator(self.seed, _EPOCH_STREAM, epoch, 0)
        order = generator.permutation(self._passes[epoch % len(self._passes)])
        chunks: list[tuple[int, np.ndarray]] = []
        for bucket in np.unique(self.index.bucket_G[order]):
            groups = order[self.index.bucket_G[order] == bucket]
            starts = range(0, len(groups), self.groups_per_update)
            chunks += [(int(bucket), groups[start : start + self.groups_per_update]) for start in starts]
        bucket, groups = chunks[generator.permutation(len(chunks))[position]]
        return Update(step, epoch, bucket, tuple(int(group) for group in groups))

    def _draw_days(self, step: int, epoch: int, position: int) -> Update:
        generator = _generator(self.seed, _DAYS_STREAM, epoch, position)
        shares_BD, groups_BD = self._day_shares
        bucket = int(generator.choice(len(shares_BD), p=shares_BD.sum(axis=1) / shares_BD.sum()))
        shares_D = shares_BD[bucket] / shares_BD[bucket].sum()
        num_days = min(self.days_per_batch, self.groups_per_update, int(np.count_nonzero(shares_D)))
        days = generator.choice(len(shares_D), size=num_days, replace=False, p=shares_D)
        groups: list[int] = []
        for position_of_day, day in enumerate(days):
            count = self.groups_per_update // num_days + (position_of_day < self.groups_per_update % num_days)
            of_day, weights = groups_BD[bucket, int(day)]
            groups += [int(group) for group in generator.choice(of_day, size=count, p=weights)]
        return Update(step, epoch, bucket, tuple(groups))

    @cached_property
    def _day_shares(self) -> tuple[np.ndarray, dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]]:
        """Share of each day's trials that lies in each bucket (float64); of each bucket and day, its groups and theirs.

        A group's weight is how many of its trials are of the day: so every trial of a day is as likely as another.
        """
        index = self.index
        groups_V, slots_V = np.nonzero(index.valid_GB)
        days_V = index.days_GB[groups_V, slots_V]
        trials_GD = np.zeros((len(index.bucket_G), int(days_V.max()) + 1))
        np.add.at(trials_GD, (groups_V, days_V), 1)
        trials_BD = np.zeros((int(index.bucket_G.max()) + 1, trials_GD.shape[1]))
        np.add.at(trials_BD, index.bucket_G, trials_GD)
        groups_BD = {}
        for bucket, day in zip(*np.nonzero(trials_BD), strict=True):
            groups = np.flatnonzero((index.bucket_G == bucket) & (trials_GD[:, day] > 0))
            groups_BD[int(bucket), int(day)] = groups, trials_GD[groups, day] / trials_GD[groups, day].sum()
        return trials_BD / np.maximum(trials_BD.sum(axis=0), 1), groups_BD


def deal(
    groups: Sequence[int], groups_per_update: int, num_ranks: int, accumulation: int
) -> list[list[tuple[int, ...]]]:
    """Deals the groups of an update over ranks and micro-steps, evenly, each group to exactly one place.

    The shape depends on the three numbers alone, never on how many groups this update has: what is missing is
    `EMPTY`. Ranks are served first, then micro-steps, so that an update with few groups still busies every rank.

    Args:
        groups: the groups of one update, at most `groups_per_update`.
        groups_per_update: the most an update can hold.
        num_ranks: at least 1.
        accumulation: micro-steps an update, at least 1.

    Returns:
        `[rank][micro]`, each a tuple of ceil(groups_per_update / (num_ranks * accumulation)) groups.
    """
    assert len(groups) <= groups_per_update, "an update holds more groups than were announced"
    slots = -(-groups_per_update // (num_ranks * accumulation))
    dealt = [[[EMPTY] * slots for _ in range(accumulation)] for _ in range(num_ranks)]
    for place, group in enumerate(groups):
        turn, rank = divmod(place, num_ranks)
        slot, micro = divmod(turn, accumulation)
        dealt[rank][micro][slot] = group
    return [[tuple(micro) for micro in rank] for rank in dealt]


def plan_evaluation(index: SplitIndex, num_ranks: int, groups_per_core: int) -> list[EvaluationStep]:
    """Every trial of a split exactly once, all ranks in the same bucket and for the same number of steps.

    Args:
        index: the split to evaluate, of which the first pass is taken; it may have no groups, then there are no steps.
        num_ranks: at least 1.
        groups_per_core: slots a rank has in a step, at least 1.
    """
    steps = []
    capacity = num_ranks * groups_per_core
    is_first_G = index.pass_G == index.pass_G.min(initial=np.iinfo(np.int32).max)
    for bucket in np.unique(index.bucket_G):
        groups = [int(group) for group in np.flatnonzero(is_first_G & (index.bucket_G == bucket))]
        for start in range(0, len(groups), capacity):
            dealt = deal(groups[start : start + capacity], capacity, num_ranks, 1)
            steps.append(EvaluationStep(int(bucket), tuple(rank[0] for rank in dealt)))
    return steps


def _generator(seed: int, stream: int, epoch: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, epoch, index])))
