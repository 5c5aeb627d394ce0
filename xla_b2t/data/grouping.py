"""Which trials share a group, and what the buckets are.

In: the lengths of the kept trials. Out: buckets, and for every split the groups in the order in which they are stored.
Everything here is arithmetic on records; reading and writing is left to `prebatch`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_b2t.data.buckets import SLOT_MULTIPLE, best_edges, bucket_of, choose_edges, round_up
from xla_b2t.data.groups import Bucket

_SHUFFLE_STREAM = 3


MOST_COMPARED = 16
"""So many numbers of buckets are compared in the report."""


@dataclass(frozen=True)
class TrialRecord:
    """What is known about a kept trial without its features.

    Attributes:
        trial_id: `session/split/trial`.
        file: place in the files of the source.
        day: place in the sessions of the source.
        block: of its session, -1 where it is unknown.
        input_bins: T.
        num_features: C.
        labels: classes; () without labels.
        required_steps: output steps that it takes to spell them.
    """

    trial_id: str
    file: int
    day: int
    block: int
    input_bins: int
    num_features: int
    labels: tuple[int, ...]
    required_steps: int

    @property
    def name(self) -> str:
        """Name of the trial in its file."""
        return self.trial_id.split("/", 2)[2]

    def without_labels(self) -> "TrialRecord":
        """The same trial, unlabelled."""
        return replace(self, labels=(), required_steps=0)


@dataclass(frozen=True)
class PlannedGroup:
    """A group before it is written: 1 to `group_size` trials, all within one bucket."""

    bucket: int
    pass_number: int
    trials: tuple[TrialRecord, ...]


@dataclass(frozen=True)
class Plan:
    """Every group of every split.

    Attributes:
        buckets: of every split.
        groups: by split.
        real_shares: the share of real bins that the trials the buckets were chosen for would have in 1, 2, 3 ... best
            buckets, each trial by itself.
    """

    buckets: tuple[Bucket, ...]
    groups: dict[str, tuple[PlannedGroup, ...]]
    real_shares: tuple[float, ...]


def plan_groups(
    trials: dict[str, Sequence[TrialRecord]], group_size: int, num_buckets: int, seed: int, num_passes: int = 1
) -> Plan:
    """Chooses the buckets that waste least, and puts the trials of a bucket into groups.

    The edges are the best for the trials of `train` (of the first split there is, without it) and serve every split;
    the last holds the longest trial of all. Within a day and bucket the trials are shuffled and fill groups. What is
    left over of the days fills groups of neighbouring days: groups of one day alone would waste more than all other
    padding together (docs/decisions/0011-mixed-groups.md).

    Args:
        trials: kept trials of each split that has any; at least one split.
        group_size: trials a group, at least 1.
        num_buckets: the most buckets, at least 1.
        seed: of the shuffle.
        num_passes: how many times `train` is grouped, each time shuffled otherwise; at least 1.
    """
    longest = max(record.input_bins for records in trials.values() for record in records)
    leading = trials["train"] if "train" in trials else next(iter(trials.values()))
    best = best_edges(np.array([record.input_bins for record in leading]), max(num_buckets, MOST_COMPARED), longest)
    edges = choose_edges(best, num_buckets)
    groups, label_slots = {}, [0] * len(edges)
    for split, records in trials.items():
        passes = range(num_passes if split == "train" else 1)
        groups[split] = tuple(group for number in passes for group in _group(records, edges, group_size, seed, number))
        for group in groups[split]:
            labels = max(len(trial.labels) for trial in group.trials)
            label_slots[group.bucket] = max(label_slots[group.bucket], labels)
    buckets = tuple(
        Bucket(edge, round_up(max(slots, 1), SLOT_MULTIPLE)) for edge, slots in zip(edges, label_slots, strict=True)
    )
    return Plan(buckets, groups, tuple(share for _, share in best))


def cut_into_parts(
    groups: Sequence[PlannedGroup], group_bytes: Sequence[int], most_bytes: int
) -> list[tuple[PlannedGroup, ...]]:
    """Cuts the groups of a split into files.

    Args:
        groups: in the order in which they are stored.
        group_bytes: what a group of each bucket takes.
        most_bytes: of a file; one group may take more, then it is alone.
    """
    parts: list[list[PlannedGroup]] = []
    taken = most_bytes
    for group in groups:
        if taken + group_bytes[group.bucket] > most_bytes:
            parts.append([])
            taken = 0
        parts[-1].append(group)
        taken += group_bytes[group.bucket]
    return [tuple(part) for part in parts]


def _group(
    records: Sequence[TrialRecord], edges: tuple[int, ...], group_size: int, seed: int, pass_number: int
) -> Iterator[PlannedGroup]:
    pools: dict[tuple[int, int], list[TrialRecord]] = {}
    for record in sorted(records, key=lambda record: (record.day, record.input_bins, record.trial_id)):
        pools.setdefault((record.day, bucket_of(record.input_bins, edges)), []).append(record)
    left_over: dict[int, list[TrialRecord]] = {}
    # In the order of days, so that each file of the source is opened once for its own groups.
    for (day, bucket), pool in sorted(pools.items()):
        key = np.random.SeedSequence([seed, _SHUFFLE_STREAM, pass_number, day, bucket])
        order = np.random.Generator(np.random.Philox(key)).permutation(len(pool))
        shuffled = [pool[place] for place in order]
        whole = len(shuffled) - len(shuffled) % group_size
        yield from _cut(shuffled[:whole], group_size, bucket, pass_number)
        left_over.setdefault(bucket, []).extend(shuffled[whole:])
    for bucket, pool in sorted(left_over.items()):
        yield from _cut(pool, group_size, bucket, pass_number)


def _cut(trials: list[TrialRecord], group_size: int, bucket: int, pass_number: int) -> Iterator[PlannedGroup]:
    for start in range(0, len(trials), group_size):
        yield PlannedGroup(bucket, pass_number, tuple(trials[start : start + group_size]))
