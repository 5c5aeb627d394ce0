"""Pre-batched groups on disk: what is in them, known without reading them.

In: a folder that `prebatch` wrote. Out: a `GroupSet`, without an open file. docs/FORMAT.md describes the files. Reading
a group is left to `group_reader`, which groups to read to `schedule`.
"""

import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from xla_b2t.data.group_format import (
    DATASETS,
    FORMAT,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    OFFSETS,
    SOURCE,
    Manifest,
    group_name,
)
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
        labelled: whether its trials have phonemes; if not, labels and required steps are 0.
        max_label: the largest class that occurs, 0 if unlabelled.
        files: paths of the HDF5 files.
        file_G: int32, which of `files` holds a group.
        place_G: int32, the group's number in that file.
        pass_G: int32, which grouping of the trials it belongs to; each pass has every trial once.
        bucket_G: int32, bucket of each group.
        checksum_G: uint32, CRC-32 of each group.
        valid_GB: bool, False for an empty slot, all of whose numbers are 0.
        days_GB: int32, day of every trial; a group may hold trials of several.
        blocks_GB: int32, block of every trial in its session, -1 where it is unknown.
        input_bins_GB: int32, bins of every trial.
        label_lengths_GB: int32, phonemes of every trial.
        required_steps_GB: int32, output steps every trial needs to be spelt.
        id_bytes_G: int32, bytes of a name of a trial as it is stored.
        offsets_GN: int64, where each of `group_format.DATASETS` begins in the group's file, bytes.
    """

    split: str
    labelled: bool
    max_label: int
    files: tuple[str, ...]
    file_G: np.ndarray
    place_G: np.ndarray
    pass_G: np.ndarray
    bucket_G: np.ndarray
    checksum_G: np.ndarray
    valid_GB: np.ndarray
    days_GB: np.ndarray
    blocks_GB: np.ndarray
    input_bins_GB: np.ndarray
    label_lengths_GB: np.ndarray
    required_steps_GB: np.ndarray
    id_bytes_G: np.ndarray
    offsets_GN: np.ndarray

    @cached_property
    def num_valid_G(self) -> np.ndarray:
        """int32, trials in each group, 1 to the group size."""
        return self.valid_GB.sum(axis=1, dtype=np.int32)

    @cached_property
    def real_bins_G(self) -> np.ndarray:
        """int64, bins of each group that are not padding."""
        return np.where(self.valid_GB, self.input_bins_GB, 0).sum(axis=1, dtype=np.int64)

    @property
    def where(self) -> str:
        """The split, for messages: `.../index.h5:/train`."""
        folder = Path(self.files[0]).parent if self.files else Path()
        return f"{folder / INDEX}:/{self.split}"

    def place(self, group: int) -> str:
        """A group, for messages: `.../train-0003.h5:/groups/0017`."""
        return f"{self.files[self.file_G[group]]}:/groups/{group_name(self.place_G[group])}"


@dataclass(frozen=True, eq=False)
class GroupSet:
    """A folder of groups.

    Attributes:
        folder: where it lies.
        conversion: differs where groups do.
        version: of the format.
        num_features: features of a trial as it is read, C.
        stored_features: features of a trial as it is stored; other than C only under `columns`.
        num_classes: classes of the labels, the blank included.
        group_size: trials a group, B.
        patch_bins: bins that every trial has at least.
        patch_stride: bins between the patches that labels were checked against.
        sessions: the session of each day.
        buckets: of every split.
        splits: by name.
        columns: the features that are read, as half-open ranges of those stored; None for all.
    """

    folder: str
    conversion: str
    version: int
    num_features: int
    stored_features: int
    num_classes: int
    group_size: int
    patch_bins: int
    patch_stride: int
    sessions: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    splits: dict[str, SplitIndex]
    columns: tuple[tuple[int, int], ...] | None = None

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


def open_group_set(folder: str | Path, check_files: bool = True) -> GroupSet:
    """Reads what a group folder holds; no file stays open.

    Args:
        folder: that `prebatch` wrote.
        check_files: whether all files must be there in full; the index must in any case.

    Raises:
        UserError: no such folder, not a group folder, one that is being written, of another version, a file missing
            or truncated, a damaged index.
    """
    root = Path(folder)
    manifest = read_manifest(root)
    for fault in find_files(root, manifest):
        if check_files or Path(fault.where).name == INDEX:
            raise fault
    group_set = _describe(root, manifest)
    for index in group_set.splits.values():
        _check_index(group_set, index)
    return group_set


def read_manifest(root: Path) -> dict[str, Any]:
    """Reads the manifest of a folder.

    Raises:
        UserError: none there, unfinished, damaged, of another format or version.
    """
    if not root.is_dir():
        raise UserError("there is no such folder", str(root), "run xla_b2t prebatch, or correct data.dir")
    path = root / MANIFEST
    if not path.is_file():
        raise _without_manifest(root)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_ours = manifest.get("format") == FORMAT
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"the manifest cannot be read: {error}", str(path), CONVERT) from None
    if not is_ours:
        raise UserError(f"this is not a manifest of groups: format {manifest.get('format')!r}", str(path), CONVERT)
    version = manifest.get("version")
    if not isinstance(version, int):
        raise UserError("the manifest is damaged: it has no version", str(path), CONVERT)
    if version != FORMAT_VERSION:
        what = f"the groups have format version {version}, this program reads version {FORMAT_VERSION}"
        fix = f"install the xla_b2t that wrote them, or {CONVERT}" if version > FORMAT_VERSION else CONVERT
        raise UserError(what, str(path), fix)
    try:
        msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise UserError(f"the manifest is damaged: {error}", str(path), CONVERT) from None
    return manifest


def _without_manifest(root: Path) -> UserError:
    names = sorted(file.name for file in root.iterdir())
    unfinished = [name for name in names if name == SOURCE or name.removesuffix(".partial").endswith(".h5")]
    if not unfinished:
        what = f"this is not a folder of groups: no {MANIFEST}"
        return UserError(what, str(root), "run xla_b2t prebatch, or correct data.dir")
    shown = ", ".join(unfinished[:3]) + (f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else "")
    return UserError(
        f"the converter is still writing, or was interrupted: {shown}, but no {MANIFEST}",
        str(root),
        f"wait for it, or {CONVERT}: it goes on where it stopped",
    )


def find_files(root: Path, manifest: dict[str, Any]) -> Iterator[UserError]:
    """Every file of a manifest that is missing or of another size, as the error that it is."""
    for entry in (manifest["index"], *(file for split in manifest["splits"].values() for file in split["files"])):
        path = root / entry["file"]
        if not path.is_file():
            yield UserError(f"the manifest lists {entry['file']}, but it is missing", str(path), CONVERT)
        elif path.stat().st_size != entry["bytes"]:
            what = f"the file has {path.stat().st_size} bytes, expected {entry['bytes']}"
            yield UserError(what, str(path), f"copy it again, or {CONVERT}")


def _describe(root: Path, manifest: dict[str, Any]) -> GroupSet:
    return GroupSet(
        folder=str(root),
        conversion=manifest["conversion"],
        version=manifest["version"],
        num_features=manifest["num_features"],
        stored_features=manifest["num_features"],
        num_classes=manifest["num_classes"],
        group_size=manifest["group_size"],
        patch_bins=manifest["patch_bins"],
        patch_stride=manifest["patch_stride"],
        sessions=tuple(manifest["sessions"]),
        buckets=tuple(Bucket(**bucket) for bucket in manifest["buckets"]),
        splits={index.split: index for index in _read_index(root, manifest)},
    )


def _read_index(root: Path, manifest: dict[str, Any]) -> Iterator[SplitIndex]:
    path = root / INDEX
    content = path.read_bytes()
    found, expected = zlib.crc32(content), manifest["index"]["checksum"]
    if found != expected:
        what = f"the index is damaged: checksum {found:08x}, expected {expected:08x}"
        raise UserError(what, str(path), f"copy it again, or {CONVERT}")
    for split, entry in manifest["splits"].items():
        try:
            with h5py.File(io.BytesIO(content), "r") as file:
                if file.attrs["conversion"] != manifest["conversion"]:
                    raise UserError("the index is of another conversion than its manifest", str(path), CONVERT)
                table = {name: stored[()] for name, stored in file[split].items()}
            yield SplitIndex(
                split=split,
                labelled=bool(entry["labelled"]),
                max_label=int(table["max_label"].max(initial=0)),
                files=tuple(str(root / file["file"]) for file in entry["files"]),
                file_G=table["file"],
                place_G=table["place"],
                pass_G=table["pass"],
                bucket_G=table["bucket"],
                checksum_G=table["checksum"],
                valid_GB=table["valid"].astype(bool),
                days_GB=table["days"],
                blocks_GB=table["blocks"],
                input_bins_GB=table["input_bins"],
                label_lengths_GB=table["label_lengths"],
                required_steps_GB=table["required_steps"],
                id_bytes_G=table["id_bytes"],
                offsets_GN=table[OFFSETS],
            )
        except (OSError, KeyError, RuntimeError, AttributeError) as error:
            raise UserError(f"the index cannot be read: {error}", f"{path}:/{split}", CONVERT) from error


def _check_index(group_set: GroupSet, index: SplitIndex) -> None:
    """A manifest and an index that were brought together by hand, told before a number is used as a place."""
    rows = (len(index.bucket_G), group_set.group_size)
    tables = {name: values for name, values in vars(index).items() if name.endswith(("_G", "_GB"))}
    are_whole = index.offsets_GN.shape == (rows[0], len(DATASETS))
    if not are_whole or any(values.shape != rows[: values.ndim] for values in tables.values()):
        what = f"the index is damaged: its tables are not of {rows[0]} groups of {rows[1]} trials"
        raise UserError(what, index.where, CONVERT)
    for name, values, most in (
        ("file", index.file_G, len(index.files) - 1),
        ("bucket", index.bucket_G, len(group_set.buckets) - 1),
        ("days", index.days_GB, len(group_set.sessions) - 1),
    ):
        if values.size and not (values.min() >= 0 and values.max() <= most):
            found = f"{name} goes from {values.min()} to {values.max()}, expected 0 to {most}"
            raise UserError(f"the index is damaged: {found}", f"{index.where}/{name}", CONVERT)
