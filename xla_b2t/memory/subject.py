"""What a plan is made for: the sizes and buckets of some data, which may not be there yet.

In: the folder of groups that a configuration names, or buckets given by hand. Out: a `Subject`.
"""

from dataclasses import dataclass

import numpy as np

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import BatchPlan
from xla_b2t.data.groups import Bucket, GroupSet
from xla_b2t.data.phonemes import NUM_CLASSES
from xla_b2t.data.prebatch import PrebatchSettings
from xla_b2t.data.schedule import Schedule
from xla_b2t.data.selection import open_selected
from xla_b2t.models.protocol import Sizes, sizes_of

_MOST_UPDATES = 2000
"""Shares of buckets are counted over an epoch, or so many updates of it."""
_BINS_PER_LABEL = 20
"""Of buckets given by hand: 0.4 s a phoneme, where the public data have 0.6 s in the mean."""
_SLOTS = 8  # label slots are given in multiples of it


@dataclass(frozen=True)
class Subject:
    """Data as far as a plan needs them.

    Attributes:
        sizes: features, days and classes.
        buckets: in order of length.
        group_size: trials a group.
        groups: the folder; None where there is none yet.
    """

    sizes: Sizes
    buckets: tuple[Bucket, ...]
    group_size: int
    groups: GroupSet | None = None

    def shares(self, config: Config, plan: BatchPlan) -> list[float]:
        """Share of a run's updates that each bucket has; alike where there are no data to tell."""
        if self.groups is None:
            return [1 / len(self.buckets)] * len(self.buckets)
        schedule = Schedule(
            config.data.recipe,
            self.groups.splits["train"],
            config.run.seed,
            plan.groups_per_update,
            config.data.days_per_batch,
        )
        steps = range(min(schedule.updates_per_epoch, config.train.steps, _MOST_UPDATES))
        counts = np.bincount([schedule.update(step).bucket for step in steps], minlength=len(self.buckets))
        return (counts / counts.sum()).tolist()


def subject_of(config: Config) -> Subject:
    """The data of a run.

    Raises:
        UserError: as of `open_selected`.
    """
    groups = open_selected(config.data)
    return Subject(sizes_of(groups), groups.buckets, groups.group_size, groups)


def subject_by_hand(input_bins: tuple[int, ...], num_features: int, num_days: int) -> Subject:
    """Data that are not there yet: buckets of these lengths, as `prebatch` groups trials by default."""
    buckets = [Bucket(bins, -(-bins // _BINS_PER_LABEL // _SLOTS) * _SLOTS) for bins in sorted(set(input_bins))]
    return Subject(Sizes(num_features, num_days, NUM_CLASSES), tuple(buckets), PrebatchSettings().group_size)
