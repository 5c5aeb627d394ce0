"""Reading pre-batched groups.

In: a `GroupSet`, perhaps seen through a selection, and group numbers. Out: `Batch`es of numpy arrays. Which groups to
read is left to `schedule`, tensors to the feed. The index says where everything is: HDF5 is not asked.
"""

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from xla_b2t.data.group_format import DATASETS, SMALL_DATASETS, group_checksum
from xla_b2t.data.groups import CONVERT, Batch, GroupSet
from xla_b2t.errors import UserError

_MOST_OPEN = 16
"""Files that a reader keeps open."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """What is read of a group once, since the index does not hold it."""

    labels_BL: np.ndarray
    trial_ids: tuple[str, ...]


class GroupReader:
    """Reads groups of one split. It opens files on the first read, in the process that reads.

    Features are mapped, not copied: what `read` gives for one group are the pages of the file (changes to it stay
    private). The checksum of a group is verified the first time it is read; after that only its pages are looked at.

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
        self._files: dict[int, int] = {}
        self._known: dict[int, _Stored] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A handle must not cross a process boundary: the copy opens its own.
        return {**self.__dict__, "_files": {}, "_known": {}}

    def __enter__(self) -> "GroupReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, groups: Sequence[int], bucket: int) -> Batch:
        """Groups of one bucket, one after the other on axis 0; -1 gives an empty one.

        Args:
            groups: at least one group number, or -1.
            bucket: the bucket that all of them have; it fixes the shapes.

        Raises:
            UserError: a group that is missing, damaged or not as the index says, with its place in its file.
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
        index = self.index
        assert index.bucket_G[group] == bucket, f"group {group} is of bucket {index.bucket_G[group]}, not {bucket}"
        shape = (
            self.group_set.group_size,
            self.group_set.buckets[bucket].input_bins,
            self.group_set.stored_features,
        )
        stored = self._known.get(group)
        if stored is None:
            stored, features_BTC = self._read_first(group, shape)
            self._known[group] = stored
        else:
            features_BTC = self._map(group, shape)
        valid_B = index.valid_GB[group]
        labels_BL, trial_ids = stored.labels_BL, stored.trial_ids
        if any(trial_ids[slot] for slot in np.flatnonzero(~valid_B)):
            # A selection leaves trials out: what is stored of them must not reach a core.
            labels_BL = np.where(valid_B[:, None], labels_BL, 0)
            trial_ids = tuple(name if valid else "" for name, valid in zip(trial_ids, valid_B, strict=True))
            features_BTC[~valid_B] = 0
        columns = self.group_set.columns
        if columns is not None:
            features_BTC = np.concatenate([features_BTC[..., start:stop] for start, stop in columns], axis=2)
        return Batch(
            features_BTC=features_BTC,
            input_bins_B=np.where(valid_B, index.input_bins_GB[group], 0),
            labels_BL=labels_BL,
            label_lengths_B=np.where(valid_B, index.label_lengths_GB[group], 0),
            required_steps_B=np.where(valid_B, index.required_steps_GB[group], 0),
            days_B=np.where(valid_B, index.days_GB[group], 0),
            valid_B=valid_B,
            trial_ids=trial_ids,
        )

    def _read_first(self, group: int, shape: tuple[int, int, int]) -> tuple[_Stored, np.ndarray]:
        index, small = self.index, self.read_small(group)
        features_BTC = self._map(group, shape)
        if self.verify:
            found, expected = group_checksum(features_BTC, small), int(index.checksum_G[group])
            if found != expected:
                what = f"the group is damaged: checksum {found:08x}, expected {expected:08x}"
                raise UserError(what, f"{index.place(group)}/features", CONVERT)
        return _Stored(small["labels"], tuple(name.decode() for name in small["trial_ids"])), features_BTC

    def read_small(self, group: int) -> dict[str, np.ndarray]:
        """What a group stores beside its features, as it is stored.

        Raises:
            UserError: the file is not there, or ends before it.
        """
        size, bucket = self.group_set.group_size, self.group_set.buckets[self.index.bucket_G[group]]
        shapes = {"labels": (size, bucket.label_slots)}
        types = {"valid": "u1", "trial_ids": f"S{self.index.id_bytes_G[group]}"}
        small = {}
        for name in SMALL_DATASETS:
            small[name] = np.empty(shapes.get(name, (size,)), types.get(name, "<i4"))
            num_bytes = small[name].nbytes
            with self._told(group, name) as (file, offset):
                if os.preadv(file, [small[name].reshape(-1).view(np.uint8)], offset) != num_bytes:
                    raise ValueError(f"the file ends before byte {offset + num_bytes}")
        return small

    def _map(self, group: int, shape: tuple[int, int, int]) -> np.ndarray:
        """The features, as pages of the file."""
        count = math.prod(shape)
        with self._told(group, "features") as (file, offset):
            # Touching a page beyond the end of a file kills the process (SIGBUS): a file that shrank is found first.
            if os.fstat(file).st_size < offset + 2 * count:
                raise ValueError(f"the file ends before byte {offset + 2 * count}")
            aligned = offset - offset % mmap.ALLOCATIONGRANULARITY
            view = mmap.mmap(file, offset + 2 * count - aligned, access=mmap.ACCESS_COPY, offset=aligned)
        return np.frombuffer(view, np.uint16, count, offset - aligned).reshape(shape)

    @contextmanager
    def _told(self, group: int, name: str) -> Iterator[tuple[int, int]]:
        """The file of a group and where a dataset begins in it; what goes wrong with them is told with the place."""
        try:
            yield self._open(group), int(self.index.offsets_GN[group, DATASETS.index(name)])
        except (OSError, ValueError) as error:
            where = f"{self.index.place(group)}/{name}"
            raise UserError(f"the group cannot be read: {error}", where, CONVERT) from error

    def _open(self, group: int) -> int:
        number = int(self.index.file_G[group])
        if number not in self._files:
            if len(self._files) == _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[number] = os.open(self.index.files[number], os.O_RDONLY)
        return self._files[number]
