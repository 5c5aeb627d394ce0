"""Whether every dataset of every group is stored as docs/FORMAT.md says, from the metadata of the files alone.

In: an opened `GroupSet`. Out: what is stored otherwise, one `Mismatch` for each way of it. No trial is read: what the
datasets hold is left to the checksums of `group_reader.GroupReader`, what the index says to `audit/inventory.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5t

from xla_b2t.data.group_format import DATASETS, SMALL_DATASETS, group_name
from xla_b2t.data.groups import CONVERT, GroupSet, SplitIndex
from xla_b2t.errors import UserError

BITS = "bfloat16"
"""What the attribute `dtype` of features says: numbers of 16 bits, kept as uint16."""

_IN_WORDS = {"features": f"uint16, the bits of {BITS}", "valid": "uint8", "trial_ids": "bytes of one length"}


@dataclass(frozen=True)
class Mismatch:
    """One way in which groups of a split are stored otherwise than they must be.

    Attributes:
        split: `train`, `val` or `test`.
        dataset: its name in the group, "" for the group itself.
        where: the first of them, `train-0000.h5:/groups/0017/features`.
        found: what is stored there.
        expected: what must be.
        groups: how many groups have it.
        of: how many groups the split has.
    """

    split: str
    dataset: str
    where: str
    found: str
    expected: str
    groups: int
    of: int


def mismatches(group_set: GroupSet, split: str = "", file: int = -1) -> list[Mismatch]:
    """Everything that is stored otherwise than docs/FORMAT.md says, by split, group and dataset.

    Args:
        group_set: as opened.
        split: the only one to look at; "" for all.
        file: place of the only file of the split to look at; -1 for all.

    Raises:
        UserError: a file that cannot be read.
    """
    indices = [index for name, index in group_set.splits.items() if split in ("", name)]
    return [mismatch for index in indices for mismatch in _of_split(group_set, index, file)]


def _of_split(group_set: GroupSet, index: SplitIndex, only: int) -> list[Mismatch]:
    first: dict[tuple[str, str, str], tuple[int, str, str]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    types = _types()
    for number, path in enumerate(index.files):
        if only not in (-1, number):
            continue
        try:
            with h5py.File(path, "r") as file:
                of_file = np.flatnonzero(index.file_G == number)
                groups = h5g.open(file.id, b"groups") if len(of_file) else None
                for group in of_file:
                    for dataset, aspect, found, expected in _of_group(group_set, index, groups, group, types):
                        # Shapes differ from bucket to bucket, types do not: a type more is a mismatch more.
                        key = (dataset, aspect, found if aspect == "type" else "")
                        first.setdefault(key, (group, found, expected))
                        counts[key] = counts.get(key, 0) + 1
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"the groups cannot be read: {error}", f"{path}:/groups", CONVERT) from error
    return [
        Mismatch(
            split=index.split,
            dataset=key[0],
            where="/".join(filter(None, (index.place(group), key[0]))),
            found=found,
            expected=expected,
            groups=counts[key],
            of=len(index.bucket_G),
        )
        for key, (group, found, expected) in first.items()
    ]


def _of_group(
    group_set: GroupSet, index: SplitIndex, groups: h5g.GroupID, group: int, types: dict[str, h5t.TypeID]
) -> Iterator[tuple[str, str, str, str]]:
    """(dataset, aspect, found, expected) of everything that is wrong with one group."""
    try:
        node = h5g.open(groups, group_name(index.place_G[group]).encode())
    except (KeyError, ValueError):
        yield "", "missing", "no such group", "a group for each row of the index"
        return
    size, bucket = group_set.group_size, group_set.buckets[index.bucket_G[group]]
    shapes = {
        "features": (size, bucket.input_bins, group_set.stored_features),
        "labels": (size, bucket.label_slots),
    }
    for dataset in DATASETS:
        try:
            stored = h5d.open(node, dataset.encode())
        except (KeyError, TypeError, ValueError):
            yield dataset, "missing", "no such dataset", _IN_WORDS.get(dataset, "int32")
            continue
        yield from _of_type(dataset, stored, types)
        shape = shapes.get(dataset, (size,))
        if stored.shape != shape:
            yield (
                dataset,
                "shape",
                f"shape {stored.shape}",
                f"{shape}, of its bucket" if dataset in shapes else f"{shape}",
            )
        if dataset == "features" and stored.get_offset() is None:
            yield dataset, "layout", "chunked, compressed or empty", "contiguous, so that it can be mapped"


def _of_type(dataset: str, stored: h5d.DatasetID, types: dict[str, h5t.TypeID]) -> Iterator[tuple[str, str, str, str]]:
    kind = stored.get_type()
    if dataset == "trial_ids":
        is_right = kind.get_class() == h5t.STRING and not kind.is_variable_str()
    else:
        is_right = kind == types[dataset]
    if not is_right:
        yield dataset, "type", str(kind.dtype), _IN_WORDS.get(dataset, "int32")
    elif dataset == "features":
        bits = _bits(stored)
        if bits != BITS:
            yield dataset, "type", f"uint16 with the attribute dtype = {bits!r}", f"the attribute dtype = {BITS!r}"


def _types() -> dict[str, h5t.TypeID]:
    """HDF5's type of every dataset but `trial_ids`. Comparing those is many times faster than asking for NumPy's."""
    numbers = {**dict.fromkeys(SMALL_DATASETS, "<i4"), "features": "<u2", "valid": "u1"}
    return {name: h5t.py_create(np.dtype(number)) for name, number in numbers.items() if name != "trial_ids"}


def _bits(features: h5d.DatasetID) -> str | None:
    if not h5a.exists(features, b"dtype"):
        return None
    attribute = h5a.open(features, b"dtype")
    value = np.empty(attribute.shape, attribute.dtype)
    attribute.read(value)
    text = value[()] if value.ndim == 0 else value
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
