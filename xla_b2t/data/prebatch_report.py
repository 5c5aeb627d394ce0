"""What a conversion did, for people and for the manifest, which are one.

In: what was scanned, planned and written. Out: a `PrebatchReport`, and the manifest's content.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xla_b2t.data.group_format import ListedFile
from xla_b2t.data.group_writer import Part
from xla_b2t.data.groups import Bucket
from xla_b2t.data.trials import Refusal


@dataclass(frozen=True)
class SplitReport:
    """What became of one split; `stored_bins` includes padding and empty slots.

    Numbers of groups and bins are of all passes, numbers of trials of one.
    """

    files: tuple[ListedFile, ...]
    labelled: bool
    trials_in: int
    trials_kept: int
    labels_ignored: int
    passes: int
    groups: int
    mixed_groups: int
    real_bins: int
    stored_bins: int
    padding_efficiency: float
    trials_per_bucket: tuple[int, ...]
    groups_per_bucket: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(part.bytes for part in self.files)


@dataclass(frozen=True)
class PrebatchReport:
    """What a conversion did; the manifest holds the same, but where it lies and how it came about.

    Attributes:
        folder: of the groups.
        num_features: of every trial.
        sessions: the session of each day.
        buckets: of every split.
        real_shares: real bins in 1, 2, 3 ... best buckets, as of `grouping.Plan`.
        splits: by name.
        refused: trials that could not be used, in the order of the files.
        ignored: what was passed over in the source.
        notes: what there is to say about this run: up to date, gone on with, begun anew.
    """

    folder: str
    num_features: int
    sessions: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    real_shares: tuple[float, ...]
    splits: dict[str, SplitReport]
    refused: tuple[Refusal, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """Number of refused trials for each reason, the most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.refused).most_common())


def report_split(
    parts: Sequence[Part],
    buckets: Sequence[Bucket],
    group_size: int,
    labelled: bool,
    refused: int,
    labels_ignored: int,
) -> SplitReport:
    """Adds up what is in the parts of one split.

    Args:
        parts: of the split, in order.
        buckets: of the plan.
        group_size: trials a group.
        labelled: whether its trials have labels.
        refused: trials of the split that could not be used.
        labels_ignored: trials whose labels were left out.
    """
    table = {name: np.concatenate([part.tables[name] for part in parts]) for name in parts[0].tables}
    first_G = table["pass"] == 0
    valid_GB = table["valid"].astype(bool)
    groups_per_bucket = np.bincount(table["bucket"], minlength=len(buckets))
    trials_per_bucket = np.bincount(
        table["bucket"][first_G], weights=valid_GB[first_G].sum(axis=1), minlength=len(buckets)
    )
    first_day_G = np.where(valid_GB, table["days"], np.iinfo(np.int32).max).min(axis=1)
    last_day_G = np.where(valid_GB, table["days"], -1).max(axis=1)
    real = int(table["input_bins"].sum(dtype=np.int64))
    stored = group_size * sum(int(n) * bucket.input_bins for n, bucket in zip(groups_per_bucket, buckets, strict=True))
    kept = int(valid_GB[first_G].sum())
    return SplitReport(
        files=tuple(ListedFile(part.file, part.bytes) for part in parts),
        labelled=labelled,
        trials_in=kept + refused,
        trials_kept=kept,
        labels_ignored=labels_ignored,
        passes=int(table["pass"].max(initial=0)) + 1,
        groups=len(table["bucket"]),
        mixed_groups=int((first_day_G < last_day_G).sum()),
        real_bins=real,
        stored_bins=stored,
        padding_efficiency=real / max(stored, 1),
        trials_per_bucket=tuple(int(count) for count in trials_per_bucket),
        groups_per_bucket=tuple(int(count) for count in groups_per_bucket),
    )


def as_manifest(report: PrebatchReport, about: dict[str, Any]) -> dict[str, Any]:
    """The manifest's content: `about`, then the report without what belongs to the run alone."""
    content = asdict(report)
    del content["folder"], content["notes"]  # where it lies is no part of what it is: copies stay equal
    return {**about, "refused_by_reason": report.refused_by_reason, **content}


def of_manifest(folder: str, manifest: dict[str, Any], notes: tuple[str, ...]) -> PrebatchReport:
    """The report that a manifest was written from."""
    splits = {}
    for split, entry in manifest["splits"].items():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        splits[split] = SplitReport(**{**fields, "files": tuple(ListedFile(**file) for file in entry["files"])})
    return PrebatchReport(
        folder,
        manifest["num_features"],
        tuple(manifest["sessions"]),
        tuple(Bucket(**bucket) for bucket in manifest["buckets"]),
        tuple(manifest["real_shares"]),
        splits,
        tuple(Refusal(**refusal) for refusal in manifest["refused"]),
        tuple(manifest["ignored"]),
        notes,
    )
