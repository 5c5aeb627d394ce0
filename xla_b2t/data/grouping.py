"""Which trials share a group, and what the buckets are.

In: the lengths of the kept trials. Out: buckets, and for every split the groups in the order in which they are stored.
Everything here is arithmetic on records; reading and writing is left to `prebatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_b2t.data.buckets import SLOT_MULTIPLE, bucket_of, choose_edges, round_up
from xla_b2t.data.groups import Bucket

_SHUFFLE_STREAM = 3


@dataclass(frozen=True)
class TrialRecord:
    """What is known about a kept trial without its features. `file` counts the files of the source; no labels is ()."""

    trial_id: str
    file: int
    day: int
    input_bins: int
    num_features: int
    labels: tuple[int, ...]
    required_steps: int

    @property
    def name(self) -> str:
        """Name of the trial in its file."""
        return self.trial_id.rpartition("/")[2]

    def without_labels(self) -> "TrialRecord":
        """The same trial, unlabelled."""
        return replace(self, labels=(), required_steps=0)


@dataclass(frozen=True)
class PlannedGroup:
    """A group before it is written: 1 to `group_size` trials of one day, all within one bucket."""

    bucket: int
    day: int
    trials: tuple[TrialRecord, ...]


@dataclass(frozen=True)
class Plan:
    """Every group of every split."""

    buckets: tuple[Bucket, ...]
    groups: dict[str, tuple[PlannedGroup, ...]]


def plan_groups(trials: dict[str, Sequence[TrialRecord]], group_size: int, num_buckets: int, seed: int) -> Plan:
    """Cuts each day's trials, sorted by length, into groups, and chooses the buckets that waste least on them.

    The edges are the best for the groups of `train` (of the first split there is, without it) and serve every split;
    the last holds the longest trial of all. Within a day and bucket the trials are then shuffled among their groups,
    so that a group is not of one length only.

    Args:
        trials: kept trials of each split that has any; at least one split.
        group_size: trials a group, at least 1.
        num_buckets: the most buckets, at least 1.
        seed: of the shuffle.
    """
    chunks = {split: _cut_by_length(records, group_size) for split, records in trials.items()}
    longest = max(record.input_bins for records in trials.values() for record in records)
    leading = chunks["train"] if "train" in chunks else next(iter(chunks.values()))
    edges = choose_edges(np.array([chunk[-1].input_bins for chunk in leading]), num_buckets, longest)
    groups, label_slots = {}, [0] * len(edges)
    for split, of_split in chunks.items():
        groups[split] = tuple(_shuffle_within_buckets(of_split, edges, group_size, seed))
        for group in groups[split]:
            labels = max(len(trial.labels) for trial in group.trials)
            label_slots[group.bucket] = max(label_slots[group.bucket], labels)
    buckets = tuple(
        Bucket(edge, round_up(max(slots, 1), SLOT_MULTIPLE)) for edge, slots in zip(edges, label_slots, strict=True)
    )
    return Plan(buckets, groups)


def _cut_by_length(records: Sequence[TrialRecord], group_size: int) -> list[list[TrialRecord]]:
    """Chunks of one day each, ascending in length within. A day's incomplete chunk is its shortest: it pads least."""
    chunks = []
    for day in sorted({record.day for record in records}):
        of_day = sorted((record for record in records if record.day == day), key=lambda r: (r.input_bins, r.trial_id))
        first = len(of_day) % group_size or group_size
        starts = [0, *range(first, len(of_day), group_size)]
        chunks += [of_day[start:end] for start, end in zip(starts, [*starts[1:], len(of_day)], strict=True)]
    return chunks


def _shuffle_within_buckets(
    chunks: list[list[TrialRecord]], edges: tuple[int, ...], group_size: int, seed: int
) -> list[PlannedGroup]:
    pools: dict[tuple[int, int], list[TrialRecord]] = {}
    for chunk in chunks:
        pools.setdefault((chunk[0].day, bucket_of(chunk[-1].input_bins, edges)), []).extend(chunk)
    groups = []
    for (day, bucket), pool in pools.items():
        key = np.random.SeedSequence([seed, _SHUFFLE_STREAM, day, bucket])
        order = np.random.Generator(np.random.Philox(key)).permutation(len(pool))
        shuffled = [pool[place] for place in order]
        groups += [
            PlannedGroup(bucket, day, tuple(shuffled[start : start + group_size]))
            for start in range(0, len(shuffled), group_size)
        ]
    return groups
