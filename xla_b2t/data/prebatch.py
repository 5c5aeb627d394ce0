"""From trial files to groups: check every trial, plan the groups, write them.

In: a folder in the public layout. Out: a folder of groups with its manifest, and a report of what was kept and refused.
Two passes over the source: the first checks (`scan`), the second writes; a group is in memory at a time.
"""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xla_b2t.data.group_format import FORMAT, FORMAT_VERSION, MANIFEST
from xla_b2t.data.group_writer import write_manifest, write_split
from xla_b2t.data.grouping import Plan, plan_groups
from xla_b2t.data.groups import Bucket
from xla_b2t.data.padding import padded_groups
from xla_b2t.data.phonemes import NUM_CLASSES
from xla_b2t.data.scan import Needs, Progress, Scan, scan
from xla_b2t.data.trials import SPLITS, Refusal, Source, find_sessions
from xla_b2t.errors import UserError


@dataclass(frozen=True)
class PrebatchSettings:
    """How trials become groups.

    Attributes:
        group_size: trials a group.
        num_buckets: the most buckets, and so the most compiles of a step.
        patch_bins: bins of the decoder's patch; a shorter trial is refused.
        patch_stride: bins between patches; a label that needs more steps than a trial has patches is refused.
        num_features: what every trial must have; 0 takes what most have.
        seed: of the shuffle of trials among the groups of a day and bucket.
        strict: a trial that cannot be used is an error.
        overwrite: replace the groups that are in the output folder.
    """

    group_size: int = 8
    num_buckets: int = 8
    patch_bins: int = 14
    patch_stride: int = 4
    num_features: int = 0
    seed: int = 0
    strict: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("group_size", "num_buckets", "patch_bins", "patch_stride", "num_features", "seed"):
            least = 0 if name in ("num_features", "seed") else 1
            if getattr(self, name) < least:
                flag = "--" + name.removeprefix("num_").replace("_", "-")
                raise UserError(
                    f"{name} is {getattr(self, name)}, expected at least {least}", flag, f"give {least} or more"
                )


@dataclass(frozen=True)
class SplitReport:
    """What became of one split; `stored_bins` includes padding and empty slots."""

    file: str
    bytes: int
    labelled: bool
    trials_in: int
    trials_kept: int
    labels_ignored: int
    groups: int
    real_bins: int
    stored_bins: int
    padding_efficiency: float
    trials_per_bucket: tuple[int, ...]
    groups_per_bucket: tuple[int, ...]


@dataclass(frozen=True)
class PrebatchReport:
    """What a conversion did; the manifest holds the same."""

    folder: str
    num_features: int
    sessions: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    splits: dict[str, SplitReport]
    refused: tuple[Refusal, ...]
    ignored: tuple[str, ...]

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """Number of refused trials for each reason, the most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.refused).most_common())


def prebatch(
    source_dir: str | Path, out_dir: str | Path, settings: PrebatchSettings, progress: Progress = lambda *_: None
) -> PrebatchReport:
    """Converts a folder of sessions to a folder of groups. The same source and settings give the same bytes.

    Raises:
        UserError: nothing to read, a split with nothing that can be used, a refused trial under `strict`, an output
            folder that is in use, too little room on the disk.
    """
    source, out = find_sessions(source_dir), Path(out_dir)
    _refuse_used_folder(out, settings.overwrite)
    scanned = scan(source, Needs(settings.patch_bins, settings.patch_stride, settings.num_features), progress)
    _refuse_unusable(source, scanned, settings.strict)
    plan = plan_groups(scanned.kept, settings.group_size, settings.num_buckets, settings.seed)
    _prepare_folder(out, _feature_bytes(plan, settings.group_size, scanned.num_features))
    attributes = {"conversion": _conversion_id(settings, plan), "settings": json.dumps(_lasting(settings))}
    splits = {}
    for split in plan.groups:
        path = out / f"{split}.h5"
        labelled = bool(scanned.kept[split][0].labels)
        groups = padded_groups(source, plan, split, settings.group_size, scanned.num_features, progress)
        try:
            index = write_split(path, groups, attributes, labelled)
        except OSError as error:
            raise UserError(
                f"the groups cannot be written: {error}", str(path), "make room, or choose another folder"
            ) from error
        splits[split] = _report_split(path, split, plan, scanned, index, settings.group_size)
    report = PrebatchReport(
        str(out), scanned.num_features, source.sessions, plan.buckets, splits, scanned.refused, source.ignored
    )
    write_manifest(out / MANIFEST, _manifest(report, settings, attributes["conversion"]))
    return report


def _refuse_used_folder(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError("this is a file, expected a folder to write groups to", str(out), "give another folder")
    files = {file.name for file in out.iterdir()}
    foreign = sorted(files - _our_files())
    if foreign:
        raise UserError(
            f"the folder holds other things: {', '.join(foreign[:3])}", str(out), "give a folder of its own"
        )
    if MANIFEST in files and not overwrite:
        raise UserError("there are groups here already", str(out), "add --overwrite, or give another folder")


def _our_files() -> set[str]:
    names = {MANIFEST, *(f"{split}.h5" for split in SPLITS)}
    return names | {f"{name}.partial" for name in names}


def _prepare_folder(out: Path, needed_bytes: int) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder cannot be made: {error.strerror}", str(out), "choose another folder") from None
    # The manifest goes first: from here until the new one, nobody takes the folder for complete.
    for name in sorted(_our_files(), key=lambda name: name != MANIFEST):
        (out / name).unlink(missing_ok=True)
    free = shutil.disk_usage(out).free
    if free < needed_bytes:
        raise UserError(
            f"the groups need {needed_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            str(out),
            "make room, or choose another folder",
        )


def _refuse_unusable(source: Source, scanned: Scan, strict: bool) -> None:
    def describe(refused: list[Refusal]) -> str:
        return f"the first {refused[0].trial_id}: {refused[0].reason}, {refused[0].detail}"

    if strict and scanned.refused:
        count = f"{len(scanned.refused)} trials" if len(scanned.refused) > 1 else "1 trial"
        raise UserError(
            f"{count} cannot be used, {describe(list(scanned.refused))}",
            source.folder,
            "mend them, or leave --strict out to go on without them",
        )
    for split in SPLITS:
        refused = [refusal for refusal in scanned.refused if refusal.split == split]
        if refused and split not in scanned.kept:
            raise UserError(f"no trial of {split} can be used, {describe(refused)}", source.folder, "mend the trials")
    if not scanned.kept:
        raise UserError("the session files hold no trial", source.folder, "give another folder, or run xla_b2t synth")


def _feature_bytes(plan: Plan, group_size: int, num_features: int) -> int:
    bins = sum(plan.buckets[group.bucket].input_bins for groups in plan.groups.values() for group in groups)
    return 2 * bins * group_size * num_features


def _lasting(settings: PrebatchSettings) -> dict[str, Any]:
    """The settings that leave a mark on the groups."""
    return {name: value for name, value in asdict(settings).items() if name not in ("strict", "overwrite")}


def _conversion_id(settings: PrebatchSettings, plan: Plan) -> str:
    """Tells the files of one conversion from those of another."""
    content = json.dumps([FORMAT_VERSION, _lasting(settings), asdict(plan)]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _report_split(
    path: Path, split: str, plan: Plan, scanned: Scan, index: dict[str, np.ndarray], group_size: int
) -> SplitReport:
    num_buckets = len(plan.buckets)
    groups_per_bucket = np.bincount(index["bucket"], minlength=num_buckets)
    trials_per_bucket = np.bincount(index["bucket"], weights=index["num_valid"], minlength=num_buckets)
    real = int(index["real_bins"].sum())
    stored = group_size * sum(
        int(n) * bucket.input_bins for n, bucket in zip(groups_per_bucket, plan.buckets, strict=True)
    )
    kept = len(scanned.kept[split])
    return SplitReport(
        file=path.name,
        bytes=path.stat().st_size,
        labelled=bool(scanned.kept[split][0].labels),
        trials_in=kept + sum(refusal.split == split for refusal in scanned.refused),
        trials_kept=kept,
        labels_ignored=scanned.labels_ignored if split == "test" else 0,
        groups=len(index["bucket"]),
        real_bins=real,
        stored_bins=stored,
        padding_efficiency=real / stored,
        trials_per_bucket=tuple(int(count) for count in trials_per_bucket),
        groups_per_bucket=tuple(int(count) for count in groups_per_bucket),
    )


def _manifest(report: PrebatchReport, settings: PrebatchSettings, conversion: str) -> dict[str, Any]:
    content = asdict(report)
    del content["folder"]  # where it lies is no part of what it is: copies stay equal
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "conversion": conversion,
        "settings": _lasting(settings),
        "num_classes": NUM_CLASSES,
        "group_size": settings.group_size,
        "patch_bins": settings.patch_bins,
        "patch_stride": settings.patch_stride,
        "refused_by_reason": report.refused_by_reason,
        **content,
    }
