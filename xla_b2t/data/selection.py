"""A folder of groups as a configuration wants it: some sessions, blocks or features, and a fold held out.

In: an opened `GroupSet` and the table `[data]` of a configuration. Out: a `GroupSet` that has nothing else. No file is
rewritten: trials that were not asked for become empty slots, groups without a trial drop out, and features are picked
on reading. Days keep their numbers, so that weights of a run on some sessions fit a run on all.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase

import numpy as np

from xla_b2t.config import DataConfig
from xla_b2t.data.group_format import UNKNOWN_BLOCK
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import CONVERT, GroupSet, SplitIndex, open_group_set
from xla_b2t.errors import UserError

ARRAYS = ("ventral_6v", "area_4", "55b", "dorsal_6v")
"""Electrode arrays of the public data, in the order of their features."""
_ELECTRODES = 64  # of an array
_ALL_FEATURES = 2 * len(ARRAYS) * _ELECTRODES  # threshold crossings of every electrode, then spike-band power
_WHERE = "configuration: data."
_MOST_NAMED = 10


def open_selected(data: DataConfig) -> GroupSet:
    """The groups of a configuration: what every part of a run must see.

    Raises:
        UserError: as of `open_group_set` and `select`.
    """
    return select(open_group_set(data.dir), data)


def select(group_set: GroupSet, data: DataConfig) -> GroupSet:
    """What a configuration asks for of a folder.

    A fold is held out of `train`: groups of it, every `data.folds`-th within bucket and day, take the place of the
    split `val`. Where there are several passes, the trials of these groups are held out of all.

    Args:
        group_set: as opened.
        data: which sessions, blocks and features, and which fold; empty and 0 take everything as it is.

    Raises:
        UserError: a session, block or feature that is not there, nothing left to train on, an impossible fold.
    """
    splits = group_set.splits
    if data.sessions or data.blocks:
        days, blocks = _days(group_set, data.sessions), _blocks(group_set, data.blocks)
        splits = {name: _of(index, days, blocks) for name, index in splits.items()}
        if "train" in splits and not len(splits["train"].bucket_G):
            raise UserError(
                "no trial of train is of the sessions and blocks that were asked for",
                f"{_WHERE}{'blocks' if data.blocks else 'sessions'}",
                "give more data.sessions or data.blocks, or leave them out for all",
            )
    if data.folds or data.fold:
        splits = {**splits, **_folded(group_set, splits.get("train"), data.folds, data.fold)}
    columns = columns_of(data.features, group_set.stored_features)
    num_features = sum(stop - start for start, stop in columns) if columns else group_set.stored_features
    return replace(group_set, splits=splits, columns=columns, num_features=num_features)


def columns_of(features: Sequence[str], stored_features: int) -> tuple[tuple[int, int], ...] | None:
    """The columns of some features, as half-open ranges in their order; None for all.

    Args:
        features: names of arrays, or ranges such as "0-63", both ends included. Each column is taken once.
        stored_features: columns there are.

    Raises:
        UserError: no such array, no such columns, or an array of data that are not those of the public data.
    """
    taken_C = np.zeros(stored_features, bool)
    for name in features:
        for start, stop in _ranges(name, stored_features):
            taken_C[start:stop] = True
    if not features or taken_C.all():
        return None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], taken_C, [False]]).astype(np.int8)))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def _ranges(name: str, stored_features: int) -> list[tuple[int, int]]:
    where = f"{_WHERE}features"
    if match := re.fullmatch(r" *(\d+) *(?:- *(\d+) *)?", name):
        start, last = int(match[1]), int(match[2] or match[1])
        if not start <= last < stored_features:
            what = f"there are no columns {name}: the groups have {stored_features} features, 0-{stored_features - 1}"
            raise UserError(what, where, "give ranges within them, the lower end first")
        return [(start, last + 1)]
    if name not in ARRAYS:
        near = difflib.get_close_matches(name, ARRAYS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"give {', '.join(ARRAYS)}, or columns such as 0-63"
        raise UserError(f"there is no array {name!r}", where, fix)
    if stored_features != _ALL_FEATURES:
        what = f"the array {name} is one of {_ALL_FEATURES} features; the groups have {stored_features}"
        raise UserError(what, where, "give columns in place of names, such as 0-63")
    start = ARRAYS.index(name) * _ELECTRODES
    return [(first, first + _ELECTRODES) for first in (start, _ALL_FEATURES // 2 + start)]


def _days(group_set: GroupSet, patterns: Sequence[str]) -> list[int]:
    """The days whose session one of the names or globs is of; all where there is none."""
    if not patterns:
        return list(range(len(group_set.sessions)))
    days: set[int] = set()
    for pattern in patterns:
        found = {day for day, session in enumerate(group_set.sessions) if fnmatchcase(session, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, group_set.sessions, n=1, cutoff=0.5)
            there = f"{group_set.sessions[0]} to {group_set.sessions[-1]}" if group_set.sessions else "none"
            raise UserError(
                f"there is no session {pattern!r} in {group_set.folder}",
                f"{_WHERE}sessions",
                f"did you mean {near[0]}?" if near else f"the {len(group_set.sessions)} sessions are {there}",
            )
        days |= found
    return sorted(days)


def _blocks(group_set: GroupSet, asked: Sequence[int]) -> list[int] | None:
    """The blocks that were asked for; None for all."""
    if not asked:
        return None
    there = sorted({int(block) for index in group_set.splits.values() for block in np.unique(index.blocks_GB)})
    there = [block for block in there if block != UNKNOWN_BLOCK]
    missing = [block for block in asked if block not in there]
    if missing:
        more = ", ..." if len(there) > _MOST_NAMED else ""
        known = ", ".join(map(str, there[:_MOST_NAMED])) + more
        raise UserError(
            f"there is no block {missing[0]} in {group_set.folder}",
            f"{_WHERE}blocks",
            f"did you mean {min(there, key=lambda block: abs(block - missing[0]))}? the blocks are {known}"
            if there
            else f"leave data.blocks out: no trial of these groups says its block; or {CONVERT}",
        )
    return list(asked)


def _of(index: SplitIndex, days: list[int], blocks: list[int] | None) -> SplitIndex:
    kept_GB = np.isin(index.days_GB, days)
    if blocks is not None:
        kept_GB &= np.isin(index.blocks_GB, blocks)
    return _kept(index, kept_GB)


def _kept(index: SplitIndex, kept_GB: np.ndarray) -> SplitIndex:
    """Some trials; the others leave empty slots, and a group without any drops out."""
    kept_GB = kept_GB & index.valid_GB
    left_G = np.flatnonzero(kept_GB.any(axis=1))
    tables = {field.name: getattr(index, field.name) for field in fields(index)}
    tables = {name: table[left_G] for name, table in tables.items() if name.endswith(("_G", "_GB", "_GN"))}
    for name in (name for name in tables if name.endswith("_GB")):
        empty = UNKNOWN_BLOCK if name == "blocks_GB" else 0
        tables[name] = np.where(kept_GB[left_G], tables[name], tables[name].dtype.type(empty))
    return replace(index, **tables)


def _folded(group_set: GroupSet, train: SplitIndex | None, folds: int, fold: int) -> dict[str, SplitIndex]:
    """What is left of `train`, and the fold as `val`."""
    if folds < 2 or fold >= folds:
        what = f"data.folds is {folds} and data.fold is {fold}; there must be 2 folds or more, and fold counts from 0"
        fix = "set data.folds=5 and data.fold to 0 ... 4, or both to 0 for the split that the data have"
        raise UserError(what, f"{_WHERE}fold", fix)
    if train is None:
        raise UserError("there is no split train to hold a fold out of", group_set.folder, "set data.folds=0")
    first_G = np.flatnonzero(train.pass_G == train.pass_G.min(initial=np.iinfo(np.int32).max))
    if len(first_G) < folds:
        what = f"{folds} folds were asked for; there are {len(first_G)} groups of train, and a fold is whole groups"
        raise UserError(what, f"{_WHERE}folds", "use fewer folds, or pre-batch with a smaller --group-size")
    # A group of several days goes with the first of them.
    slots_G = train.valid_GB.argmax(axis=1)
    days_G = train.days_GB[np.arange(len(slots_G)), slots_G]
    order_G = first_G[np.lexsort((first_G, days_G[first_G], train.bucket_G[first_G]))]
    held_GB = np.zeros_like(train.valid_GB)
    held_GB[order_G[fold::folds]] = True
    out_GB = held_GB
    if len(first_G) < len(train.bucket_G):
        ids_GB = _trial_ids(group_set, train)
        out_GB = np.isin(ids_GB, ids_GB[held_GB & train.valid_GB])
    return {"train": _kept(train, ~out_GB), "val": _kept(train, held_GB)}


def _trial_ids(group_set: GroupSet, index: SplitIndex) -> np.ndarray:
    """Name of every trial, bytes: the index does not know which trial of one pass is which of another."""
    with GroupReader(replace(group_set, splits={index.split: index}), index.split) as reader:
        return np.stack([reader.read_small(group)["trial_ids"] for group in range(len(index.bucket_G))])
