"""Pre-batched groups on disk: what is in them, and reading them.

In: a folder that `prebatch` wrote. Out: a `GroupSet` (what there is, without an open file) and `Batch`es of numpy
arrays. docs/FORMAT.md describes the files. Which groups to read is left to `schedule`, tensors to the feed.
"""

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from xla_b2t.data.group_format import FORMAT, FORMAT_VERSION, MANIFEST, SMALL_DATASETS, group_checksum, group_name
from xla_b2t.errors import UserError

CONVERT = "run xla_b2t prebatch again"


@dataclass(frozen=True)
class Bucket:
    """The two lengths that fix the shapes of a batch."""

    input_bins: int
    label_slots: int


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """What can be known about the groups of a split without reading them.

    Attributes:
        split: `train`, `val` or `test`.
        path: the HDF5 file.
        labelled: whether its trials have phonemes; if not, labels and required steps are 0.
        bucket_G: int32, bucket of each group.
        day_G: int32, the day all trials of a group belong to.
        num_valid_G: int32, trials in each group, 1 to the group size.
        real_bins_G: int64, bins that are not padding.
        input_bins_GB: int32, bins of every trial, 0 for an empty slot.
        label_lengths_GB: int32, phonemes of every trial.
        required_steps_GB: int32, output steps every trial needs to be spelt.
        max_label: the largest class that occurs, 0 if unlabelled.
    """

    split: str
    path: str
    labelled: bool
    bucket_G: np.ndarray
    day_G: np.ndarray
    num_valid_G: np.ndarray
    real_bins_G: np.ndarray
    input_bins_GB: np.ndarray
    label_lengths_GB: np.ndarray
    required_steps_GB: np.ndarray
    max_label: int


INDEX_TABLES = {
    field.name: field.name.rpartition("_")[0] for field in fields(SplitIndex) if field.name.endswith(("_G", "_GB"))
}
"""Name of a table under /index for each array of a `SplitIndex`."""


@dataclass(frozen=True, eq=False)
class GroupSet:
    """A folder of groups: `conversion` differs when they do, `sessions[day]` is of a day, `buckets` of every split."""

    folder: str
    conversion: str
    version: int
    num_features: int
    num_classes: int
    group_size: int
    patch_bins: int
    patch_stride: int
    sessions: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    splits: dict[str, SplitIndex]

    def padding_efficiency(self, split: str) -> float:
        """Real bins over stored bins, padding within trials and empty slots both counted against it."""
        index = self.splits[split]
        stored = sum(self.buckets[bucket].input_bins for bucket in index.bucket_G) * self.group_size
        return float(index.real_bins_G.sum() / stored) if stored else 1.0


@dataclass(frozen=True, eq=False)
class Batch:
    """Trials of one or several groups of one bucket.

    Attributes:
        features_BTC: uint16, the bits of bfloat16, zero after a trial's end.
        input_bins_B: int32.
        labels_BL: int32, zero after a label's end.
        label_lengths_B: int32.
        required_steps_B: int32.
        days_B: int32.
        valid_B: bool; False marks an empty slot, all of whose numbers are 0.
        trial_ids: `session/split/trial`, "" for an empty slot.
    """

    features_BTC: np.ndarray
    input_bins_B: np.ndarray
    labels_BL: np.ndarray
    label_lengths_B: np.ndarray
    required_steps_B: np.ndarray
    days_B: np.ndarray
    valid_B: np.ndarray
    trial_ids: tuple[str, ...]


def open_group_set(folder: str | Path) -> GroupSet:
    """Reads what a group folder holds; no file stays open.

    Raises:
        UserError: no such folder, not a group folder, an unfinished or newer one, a file missing, truncated or from
            another conversion.
    """
    root = Path(folder)
    manifest = _read_manifest(root)
    try:
        group_set = _describe(root, manifest)
    except KeyError as error:
        raise UserError(f"the manifest lacks {error}", str(root / MANIFEST), CONVERT) from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"the manifest is damaged: {error}", str(root / MANIFEST), CONVERT) from error
    for index in group_set.splits.values():
        _check_index(group_set, index)
    return group_set


class GroupReader:
    """Reads groups of one split. It opens its file on the first read, in the process that reads.

    Features are mapped, not copied: what `read` gives for one group are the pages of the file (changes to it stay
    private). The checksum of a group is verified the first time it is read.

    Args:
        group_set: as opened.
        split: one of its splits.
        verify: False skips the checksums.
    """

    def __init__(self, group_set: GroupSet, split: str, verify: bool = True):
        if split not in group_set.splits:
            raise UserError(
                f"there is no split {split!r}; there are {', '.join(group_set.splits)}",
                group_set.folder,
                f"add data_{split}.hdf5 to the sessions and {CONVERT}",
            )
        self.group_set = group_set
        self.index = group_set.splits[split]
        self.verify = verify
        self._file: h5py.File | None = None
        self._verified: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A handle must not cross a process boundary: the copy opens its own.
        return {**self.__dict__, "_file": None, "_verified": set()}

    def __enter__(self) -> "GroupReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; a later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, groups: Sequence[int], bucket: int) -> Batch:
        """Groups of one bucket, one after the other on axis 0; -1 gives an empty one.

        Args:
            groups: at least one group number, or -1.
            bucket: the bucket that all of them have; it fixes the shapes.

        Raises:
            UserError: a group that is missing, damaged or not as the index says, with its place in the file.
        """
        parts = [self._empty(bucket) if group < 0 else self._read(int(group), bucket) for group in groups]
        if len(parts) == 1:
            return parts[0]
        joined = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(Batch)
            if field.name != "trial_ids"
        }
        return Batch(**joined, trial_ids=tuple(name for part in parts for name in part.trial_ids))

    def _empty(self, bucket: int) -> Batch:
        size, shape = self.group_set.group_size, self.group_set.buckets[bucket]
        zeros_B = np.zeros(size, np.int32)
        return Batch(
            features_BTC=np.zeros((size, shape.input_bins, self.group_set.num_features), np.uint16),
            input_bins_B=zeros_B,
            labels_BL=np.zeros((size, shape.label_slots), np.int32),
            label_lengths_B=zeros_B,
            required_steps_B=zeros_B,
            days_B=zeros_B,
            valid_B=np.zeros(size, bool),
            trial_ids=("",) * size,
        )

    def _read(self, group: int, bucket: int) -> Batch:
        assert self.index.bucket_G[group] == bucket, (
            f"group {group} is of bucket {self.index.bucket_G[group]}, not {bucket}"
        )
        where = f"{self.index.path}:/groups/{group_name(group)}"
        size, shape = self.group_set.group_size, self.group_set.buckets[bucket]
        features_shape = (size, shape.input_bins, self.group_set.num_features)
        try:
            if self._file is None:
                self._file = h5py.File(self.index.path, "r")
            node = self._file[f"groups/{group_name(group)}"]
            small = {name: node[name][()] for name in SMALL_DATASETS}
            offset = node["features"].id.get_offset()
            if node["features"].shape != features_shape or offset is None:
                raise ValueError(f"features are {node['features'].shape}, expected contiguous {features_shape}")
            features_BTC = _map(self.index.path, offset, features_shape)
            checksum = int(self._file["index/checksum"][group])
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"the group cannot be read: {error}", f"{where}/features", CONVERT) from error
        if self.verify and group not in self._verified:
            found = group_checksum(features_BTC, small)
            if found != checksum:
                raise UserError(
                    f"the group is damaged: checksum {found:08x}, expected {checksum:08x}", f"{where}/features", CONVERT
                )
            self._verified.add(group)
        return Batch(
            features_BTC=features_BTC,
            input_bins_B=small["input_bins"],
            labels_BL=small["labels"],
            label_lengths_B=small["label_lengths"],
            required_steps_B=small["required_steps"],
            days_B=small["days"],
            valid_B=small["valid"].astype(bool),
            trial_ids=tuple(name.decode() for name in small["trial_ids"]),
        )


def _map(path: str, offset: int, shape: Iterable[int]) -> np.ndarray:
    shape = tuple(shape)
    count = int(np.prod(shape))
    # Touching a page beyond the end of a file kills the process (SIGBUS), so a file that shrank is found first.
    if os.path.getsize(path) < offset + 2 * count:
        raise ValueError(f"the file ends before byte {offset + 2 * count}")
    aligned = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), offset + 2 * count - aligned, access=mmap.ACCESS_COPY, offset=aligned)
    return np.frombuffer(view, np.uint16, count, offset - aligned).reshape(shape)


def _read_manifest(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise UserError("there is no such folder", str(root), "run xla_b2t prebatch, or correct data.dir")
    path = root / MANIFEST
    if not path.is_file():
        unfinished = sorted(file.name for file in root.iterdir() if file.name.removesuffix(".partial").endswith(".h5"))
        if unfinished:
            raise UserError(
                f"the conversion is unfinished: {', '.join(unfinished)} but no {MANIFEST}", str(root), CONVERT
            )
        raise UserError(
            f"this is not a folder of groups: no {MANIFEST}", str(root), "run xla_b2t prebatch, or correct data.dir"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_ours = manifest.get("format") == FORMAT
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"the manifest cannot be read: {error}", str(path), CONVERT) from None
    if not is_ours:
        raise UserError(f"this is not a manifest of groups: format {manifest.get('format')!r}", str(path), CONVERT)
    if not isinstance(manifest.get("version"), int):
        raise UserError("the manifest is damaged: it has no version", str(path), CONVERT)
    if manifest["version"] > FORMAT_VERSION:
        raise UserError(
            f"the groups have format version {manifest['version']}, this program reads up to {FORMAT_VERSION}",
            str(path),
            "install the xla_b2t that wrote them, or " + CONVERT,
        )
    return manifest


def _describe(root: Path, manifest: dict[str, Any]) -> GroupSet:
    splits = {}
    for split, entry in manifest["splits"].items():
        path = root / entry["file"]
        if not path.is_file():
            raise UserError(f"the manifest lists {entry['file']}, but it is missing", str(path), CONVERT)
        size = path.stat().st_size
        if size != entry["bytes"]:
            what = f"the file has {size} bytes, expected {entry['bytes']}"
            raise UserError(what, str(path), f"copy it again, or {CONVERT}")
        splits[split] = _read_index(split, path, manifest["conversion"])
    return GroupSet(
        folder=str(root),
        conversion=manifest["conversion"],
        version=manifest["version"],
        num_features=manifest["num_features"],
        num_classes=manifest["num_classes"],
        group_size=manifest["group_size"],
        patch_bins=manifest["patch_bins"],
        patch_stride=manifest["patch_stride"],
        sessions=tuple(manifest["sessions"]),
        buckets=tuple(Bucket(**bucket) for bucket in manifest["buckets"]),
        splits=splits,
    )


def _check_index(group_set: GroupSet, index: SplitIndex) -> None:
    """The index stands outside the groups' checksums, and what it says is used before any group is read."""
    size = group_set.group_size
    for name, values, least, most in (
        ("bucket", index.bucket_G, 0, len(group_set.buckets) - 1),
        ("day", index.day_G, 0, len(group_set.sessions) - 1),
        ("num_valid", index.num_valid_G, 1, size),
    ):
        if len(values) and not (least <= values.min() and values.max() <= most):
            found = f"{name} goes from {values.min()} to {values.max()}, expected {least} to {most}"
            raise UserError(f"the index is damaged: {found}", f"{index.path}:/index/{name}", CONVERT)
    valid_G = (index.input_bins_GB > 0).sum(axis=1)
    real_G = index.input_bins_GB.sum(axis=1)
    if not (np.array_equal(valid_G, index.num_valid_G) and np.array_equal(real_G, index.real_bins_G)):
        raise UserError("the index is damaged: its counts contradict each other", f"{index.path}:/index", CONVERT)


def _read_index(split: str, path: Path, conversion: str) -> SplitIndex:
    try:
        with h5py.File(path, "r") as file:
            if not file.attrs.get("complete", False) or file.attrs.get("format") != FORMAT:
                raise UserError("the file is not a finished file of groups", str(path), CONVERT)
            if file.attrs["conversion"] != conversion:
                raise UserError("the file is of another conversion than its manifest", str(path), CONVERT)
            index = {name: file[f"index/{table}"][()] for name, table in INDEX_TABLES.items()}
            labelled, max_label = bool(file.attrs["labelled"]), int(file.attrs["max_label"])
    except (OSError, KeyError) as error:
        raise UserError(f"the file cannot be read: {error}", str(path), CONVERT) from error
    return SplitIndex(split=split, path=str(path), labelled=labelled, max_label=max_label, **index)
