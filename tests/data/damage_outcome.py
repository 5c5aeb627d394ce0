"""What became of damaged data: a clear error, a counted refusal, or the same data as before; anything else is a defect.

In: a pristine folder, a seed, and what damages. Out: an `Outcome`. Shared by the tests and by
`benchmarks/damaged_data.py`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from damage import damage_groups, damage_source

from xla_b2t.data import bfloat16
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.errors import UserError

NAMES = ("features_BTC", "input_bins_B", "labels_BL", "label_lengths_B", "required_steps_B", "days_B", "valid_B")


@dataclass(frozen=True)
class Outcome:
    """One case.

    Attributes:
        damage: what was done.
        said: the error, or how many trials were refused, or "the same data".
    """

    damage: str
    said: str


def outcome_of_source(pristine: Path, settings: PrebatchSettings, seed: int, folder: Path) -> Outcome:
    """Converts a damaged copy of a source in an empty folder, and holds what is stored against the damaged files.

    Raises:
        AssertionError: data that is not what the files say, or an error that says too little.
    """
    source = folder / "source"
    shutil.copytree(pristine, source)
    damage = damage_source(source, np.random.default_rng(seed))
    try:
        report = prebatch(source, folder / "groups", settings)
    except UserError as error:
        return Outcome(damage, _said(error))
    group_set = open_group_set(report.folder)
    kept = 0
    for split, index in group_set.splits.items():
        with GroupReader(group_set, split) as reader:
            for group, bucket in enumerate(index.bucket_G):
                batch = reader.read([group], bucket)
                for slot in np.flatnonzero(batch.valid_B):
                    _as_in_source(source, batch, slot)
                    kept += 1
    counted = kept + len(report.refused)
    assert counted == sum(split.trials_in for split in report.splits.values()), damage
    return Outcome(damage, f"{len(report.refused)} of {counted} refused")


def _as_in_source(source: Path, batch, slot: int) -> None:
    session, split, name = batch.trial_ids[slot].split("/", 2)
    bins, length = batch.input_bins_B[slot], batch.label_lengths_B[slot]
    with h5py.File(source / session / f"data_{split}.hdf5", "r") as file:
        node = file[name]
        features_TC = np.asarray(node["input_features"][()], np.float32)
        labels_L = node["seq_class_ids"][: int(node.attrs["seq_len"])] if length else np.zeros(0, np.int32)
    assert np.isfinite(features_TC).all()
    np.testing.assert_array_equal(batch.features_BTC[slot, :bins], bfloat16.to_bits(features_TC))
    np.testing.assert_array_equal(batch.labels_BL[slot, :length], labels_L)
    assert ((labels_L >= 1) & (labels_L <= 40)).all()


def outcome_of_groups(pristine: Path, seed: int, folder: Path) -> Outcome:
    """Reads a damaged copy of a folder of groups whole.

    Raises:
        AssertionError: other data than before without an error, or an error that says too little.
    """
    groups = folder / "groups"
    shutil.copytree(pristine, groups)
    damage = damage_groups(groups, np.random.default_rng(seed))
    try:
        found = _read_all(groups)
    except UserError as error:
        return Outcome(damage, _said(error))
    expected = _read_all(pristine)
    assert found.keys() == expected.keys(), damage
    for key, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[key][name], array, err_msg=f"{damage}: {key} {name}")
    return Outcome(damage, "the same data")


def _read_all(folder: Path) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    group_set = open_group_set(folder)
    found = {}
    for split, index in group_set.splits.items():
        with GroupReader(group_set, split) as reader:
            for group, bucket in enumerate(index.bucket_G):
                batch = reader.read([group], bucket)
                found[split, group] = {name: getattr(batch, name) for name in NAMES}
                found[split, group]["trial_ids"] = np.array(batch.trial_ids)
    return found


def _said(error: UserError) -> str:
    assert error.what and error.where and error.fix
    return f"{error.what} [{error.where}]"
