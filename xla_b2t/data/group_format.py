"""What the writer and the reader of groups agree on; docs/FORMAT.md says it in words.

In: a group's arrays. Out: names and its checksum.
"""

import zlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

FORMAT = "xla_b2t groups"
FORMAT_VERSION = 2
MANIFEST = "report.json"
"""Written last; a folder without it is no group set."""

INDEX = "index.h5"
"""What can be known about all groups without reading them."""

SOURCE = "source.json"
"""What the groups are made from; written first."""

SMALL_DATASETS = ("input_bins", "labels", "label_lengths", "required_steps", "days", "valid", "trial_ids")
"""Everything of a group but its features, in the order in which the checksum takes them."""

TABLES_G = {
    "pass": np.int32,
    "bucket": np.int32,
    "checksum": np.uint32,
    "max_label": np.int32,
    "id_bytes": np.int32,
}
"""Tables of an index with a number a group."""

OFFSETS = "offsets"
"""Table of an index with a number a dataset of a group: where its values begin in the file, bytes. With it a group is
read without HDF5, which a damaged file can crash or keep busy for ever."""

DATASETS = ("features", *SMALL_DATASETS)
"""In the order of `OFFSETS`."""

TABLES_GB = {
    "valid": np.uint8,
    "days": np.int32,
    "blocks": np.int32,
    "input_bins": np.int32,
    "label_lengths": np.int32,
    "required_steps": np.int32,
}
"""Tables of an index with a number a trial."""

_Number = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Name = Annotated[str, Meta(pattern=r"^[\w-]+\.h5$")]
"""Of a file in the folder, and in no other."""


@dataclass(frozen=True)
class ListedBucket:
    """A bucket, as the manifest has it."""

    input_bins: _Count
    label_slots: _Count


@dataclass(frozen=True)
class ListedFile:
    """A file, as the manifest has it."""

    file: _Name
    bytes: _Number


@dataclass(frozen=True)
class ListedIndex(ListedFile):
    """The index, as the manifest has it."""

    checksum: _Number


@dataclass(frozen=True)
class ListedSplit:
    """A split, as far as a reader needs it."""

    labelled: bool
    files: tuple[ListedFile, ...]


@dataclass(frozen=True)
class Manifest:
    """What a reader needs of `report.json`, which holds more."""

    conversion: str
    version: int
    num_features: _Count
    num_classes: _Count
    group_size: _Count
    patch_bins: _Count
    patch_stride: _Count
    sessions: tuple[str, ...]
    buckets: tuple[ListedBucket, ...]
    index: ListedIndex
    splits: dict[str, ListedSplit]


UNKNOWN_BLOCK = -1
"""Block of a trial that does not say its own, and of an empty slot."""


def part_name(split: str, part: int) -> str:
    """Name of a file of groups in its folder."""
    return f"{split}-{part:04d}.h5"


def group_name(place: int) -> str:
    """Name of a group in its file."""
    return f"{place:04d}"


def group_checksum(features_BTC: np.ndarray, small: dict[str, np.ndarray]) -> int:
    """CRC-32 over the features' bits and then the other datasets, as they are stored."""
    return small_checksum(zlib.crc32(features_BTC), small)


def small_checksum(features_checksum: int, small: dict[str, np.ndarray]) -> int:
    """The same, where the CRC-32 of the features is known already."""
    checksum = features_checksum
    for name in SMALL_DATASETS:
        checksum = zlib.crc32(np.ascontiguousarray(small[name]).tobytes(), checksum)
    return checksum
