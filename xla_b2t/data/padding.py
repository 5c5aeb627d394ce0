"""The second pass of a conversion: the planned groups, padded to their buckets and in bfloat16, one at a time.

In: the source and the plan. Out: the arrays of each group. Putting them on disk is left to `group_writer`.
"""

from collections.abc import Iterator

import h5py
import numpy as np

from xla_b2t.data import bfloat16
from xla_b2t.data.grouping import Plan, PlannedGroup, TrialRecord
from xla_b2t.data.groups import Bucket
from xla_b2t.data.scan import Progress
from xla_b2t.data.trials import Source, open_session_file
from xla_b2t.errors import UserError


def padded_groups(
    source: Source, plan: Plan, split: str, group_size: int, num_features: int, progress: Progress
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The groups of a split in their order, which is by day, so that each file is opened once.

    Args:
        source: the folder that was scanned.
        plan: made from that scan.
        split: one of the plan's.
        group_size: trials a group, B.
        num_features: of every trial, C.
        progress: called for every group.

    Returns:
        Bucket and arrays of each group, as docs/FORMAT.md describes them.

    Raises:
        UserError: a trial is not as it was when it was scanned.
    """
    groups = plan.groups[split]
    handle: h5py.File | None = None
    opened = -1
    try:
        for done, group in enumerate(groups):
            progress(f"write {split}", done, len(groups))
            file = group.trials[0].file
            if file != opened:
                if handle is not None:
                    handle.close()
                handle, opened = open_session_file(source.files[file]), file
            yield group.bucket, _pad(handle, group, plan.buckets[group.bucket], group_size, num_features)
        progress(f"write {split}", len(groups), len(groups))
    finally:
        if handle is not None:
            handle.close()


def _pad(
    handle: h5py.File, group: PlannedGroup, bucket: Bucket, group_size: int, num_features: int
) -> dict[str, np.ndarray]:
    width = max(len(trial.trial_id.encode()) for trial in group.trials)
    arrays = {
        "features": np.zeros((group_size, bucket.input_bins, num_features), np.uint16),
        "input_bins": np.zeros(group_size, np.int32),
        "labels": np.zeros((group_size, bucket.label_slots), np.int32),
        "label_lengths": np.zeros(group_size, np.int32),
        "required_steps": np.zeros(group_size, np.int32),
        "days": np.zeros(group_size, np.int32),
        "valid": np.zeros(group_size, np.uint8),
        "trial_ids": np.zeros(group_size, f"S{width}"),
    }
    for slot, trial in enumerate(group.trials):
        features_TC = _read_again(handle, trial)
        arrays["features"][slot, : trial.input_bins] = bfloat16.to_bits(features_TC)
        arrays["input_bins"][slot] = trial.input_bins
        arrays["labels"][slot, : len(trial.labels)] = trial.labels
        arrays["label_lengths"][slot] = len(trial.labels)
        arrays["required_steps"][slot] = trial.required_steps
        arrays["days"][slot] = trial.day
        arrays["valid"][slot] = 1
        arrays["trial_ids"][slot] = trial.trial_id.encode()
    return arrays


def _read_again(handle: h5py.File, trial: TrialRecord) -> np.ndarray:
    try:
        features_TC = np.asarray(handle[trial.name]["input_features"][()], np.float32)
    except (OSError, KeyError, RuntimeError) as error:
        raise _changed(handle, trial, str(error)) from error
    expected = (trial.input_bins, trial.num_features)
    if features_TC.shape != expected:
        raise _changed(handle, trial, f"it was {expected}, now {features_TC.shape}")
    return features_TC


def _changed(handle: h5py.File, trial: TrialRecord, how: str) -> UserError:
    return UserError(
        f"the trial changed between checking and writing: {how}",
        f"{handle.filename}:/{trial.name}",
        "let the source rest, and run xla_b2t prebatch again",
    )
