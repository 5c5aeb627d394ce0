"""Whether a folder of groups is what its manifest says, in all that a reader uses, before time on a core is spent.

In: a folder. Out: everything that is wrong with it, and how much was looked at. Files are gone through in parallel.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xla_b2t.data.group_format import INDEX, MANIFEST, SOURCE
from xla_b2t.data.group_layout import mismatches
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.group_writer import read_part
from xla_b2t.data.groups import CONVERT, GroupSet, SplitIndex, find_files, open_group_set, read_manifest
from xla_b2t.data.scan import Progress
from xla_b2t.data.workers import At, Workers
from xla_b2t.errors import UserError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in the three parts of a `UserError`."""

    what: str
    where: str
    fix: str


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what was found."""

    folder: str
    files: int
    groups: int
    bytes: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, eq=False)
class FileTask:
    """One file of one split."""

    group_set: GroupSet
    split: str
    number: int


def verify(folder: str | Path, num_workers: int = 0, progress: Progress = lambda *_: None) -> Verification:
    """Checks the manifest, the size of every file, the index, and the layout and checksum of every group.

    Args:
        folder: of groups.
        num_workers: processes; 0 does everything in this one.
        progress: called as groups are done.

    Returns:
        What was found; a folder without a usable manifest or index is one fault.

    Raises:
        UserError: a worker dies.
    """
    root = Path(folder)
    try:
        manifest = read_manifest(root)
    except UserError as error:
        return Verification(str(root), 0, 0, 0, (_fault(error),))
    faults = [*_strangers(root, manifest), *(_fault(error) for error in find_files(root, manifest))]
    try:
        group_set = open_group_set(root, check_files=False)
    except UserError as error:
        fault = _fault(error)
        return Verification(str(root), 0, 0, 0, (*faults, *([] if fault in faults else [fault])))
    damaged = {fault.where for fault in faults}
    tasks = [
        FileTask(group_set, split, number)
        for split, index in group_set.splits.items()
        for number, path in enumerate(index.files)
        if path not in damaged
    ]
    total = sum(int((group_set.splits[task.split].file_G == task.number).sum()) for task in tasks)
    groups, read = 0, 0
    progress("verify", 0, total)

    def at(_: str, num_bytes: int) -> None:
        nonlocal groups, read
        if num_bytes:
            groups, read = groups + 1, read + num_bytes
            progress("verify", groups, total, read)

    with Workers(num_workers) as workers:
        by_file = dict(workers.run(verify_file, tasks, at))
    faults += [fault for number in range(len(tasks)) for fault in by_file[number]]
    return Verification(str(root), len(tasks), groups, read, tuple(faults))


def verify_file(task: FileTask, at: At) -> list[Fault]:
    """Everything that is wrong with the groups of one file."""
    index = task.group_set.splits[task.split]
    path = index.files[task.number]
    at(path, 0)
    try:
        faults = [
            Fault(f"{found.found} in {found.groups} groups, expected {found.expected}", found.where, CONVERT)
            for found in mismatches(task.group_set, task.split, task.number)
        ]
    except UserError as error:
        return [_fault(error)]
    part = read_part(Path(path), task.group_set.conversion)
    if part is None:
        return [*faults, Fault("the file is not a finished one of the manifest's conversion", path, CONVERT)]
    rows_G = index.file_G == task.number
    for table, values in (
        ("pass", index.pass_G),
        ("bucket", index.bucket_G),
        ("checksum", index.checksum_G),
        ("blocks", index.blocks_GB),
    ):
        if not np.array_equal(part.tables[table], values[rows_G]):
            faults.append(
                Fault("the file's own index says otherwise than that of all", f"{path}:/index/{table}", CONVERT)
            )
    told = {place for fault in faults for place in (fault.where, fault.where.rpartition("/")[0])}
    # A fresh reader: what was verified before is verified again.
    with GroupReader(task.group_set, task.split) as reader:
        for group in np.flatnonzero(rows_G):
            bucket = int(index.bucket_G[group])
            try:
                batch = reader.read([group], bucket)
                faults += _against_index(index, reader, int(group))
                at(path, batch.features_BTC.nbytes)
            except UserError as error:
                fault = _fault(error)
                if index.place(group) not in told:
                    faults.append(fault)
                at(path, 1)
                if fault.where == path:  # the file as a whole
                    break
    return faults


def _against_index(index: SplitIndex, reader: GroupReader, group: int) -> Iterator[Fault]:
    """The index holds copies of what a group says: they are read in its place."""
    small = reader.read_small(group)
    for table, values_GB in (
        ("valid", index.valid_GB),
        ("days", index.days_GB),
        ("input_bins", index.input_bins_GB),
        ("label_lengths", index.label_lengths_GB),
        ("required_steps", index.required_steps_GB),
    ):
        if not np.array_equal(small[table], values_GB[group]):
            yield Fault("the index says otherwise than the group", f"{index.place(group)}/{table}", CONVERT)


def _strangers(root: Path, manifest: dict) -> Iterator[Fault]:
    listed = {MANIFEST, INDEX, SOURCE}
    listed |= {file["file"] for split in manifest["splits"].values() for file in split["files"]}
    for name in sorted(os.listdir(root)):
        if name.endswith(".partial"):
            what = "the converter is still writing, or was interrupted"
            yield Fault(what, str(root / name), f"wait for it, or {CONVERT}")
        elif name.endswith(".h5") and name not in listed:
            yield Fault("the manifest does not list this file", str(root / name), f"remove it, or {CONVERT}")


def _fault(error: UserError) -> Fault:
    return Fault(error.what, error.where, error.fix)
