"""The second pass of a conversion: the planned groups, padded to their buckets and in bfloat16, one at a time.

In: the source and the plan. Out: the arrays of each group. Putting them on disk is left to `group_writer`.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

import h5py
import numpy as np

from xla_b2t.data.group_format import UNKNOWN_BLOCK
from xla_b2t.data.group_writer import PaddedGroup
from xla_b2t.data.grouping import PlannedGroup
from xla_b2t.data.groups import Bucket
from xla_b2t.data.trials import Refusal, SessionFile, open_session_file, read_features

_MOST_OPEN = 8
"""Files of the source that are open at once: a mixed group has trials of several."""


def padded_groups(
    files: Sequence[SessionFile],
    buckets: Sequence[Bucket],
    groups: Sequence[PlannedGroup],
    group_size: int,
    refused: list[Refusal],
    at: Callable[[str, int], None],
) -> Iterator[PaddedGroup]:
    """The groups in their order; one is in memory at a time, and is overwritten by the next.

    A trial whose features cannot be used leaves its slot empty. A group without any trial is left out.

    Args:
        files: of the source.
        buckets: of the plan.
        groups: those to pad.
        group_size: trials a group, B.
        refused: filled with the trials that cannot be used.
        at: called with the file before, and the bytes of its features in the source after, each trial.

    Raises:
        UserError: a file of the source cannot be opened any more.
    """
    handles: dict[int, h5py.File] = {}
    num_features = groups[0].trials[0].num_features
    most_bins = max(buckets[group.bucket].input_bins for group in groups)
    room_N = np.zeros(group_size * most_bins * num_features, np.uint16)
    trial_N = np.empty(most_bins * num_features, np.float32)
    try:
        for group in groups:
            bins = buckets[group.bucket].input_bins
            features_BTC = room_N[: group_size * bins * num_features].reshape(group_size, bins, num_features)
            small, blocks_B = _empty_slots(group, buckets[group.bucket], group_size)
            checksum = 0
            for slot, features_TC in enumerate(features_BTC):
                trial = group.trials[slot] if slot < len(group.trials) else None
                filled = 0
                if trial is not None:
                    at(files[trial.file].path, 0)
                    handle = _open(handles, files, trial.file)
                    values_TC = trial_N[: trial.input_bins * num_features].reshape(trial.input_bins, num_features)
                    refusal = read_features(handle, trial.trial_id, values_TC, features_TC[: trial.input_bins])
                    at(files[trial.file].path, values_TC.nbytes)
                    if refusal is None:
                        filled = trial.input_bins
                        _fill_slot(small, blocks_B, group, slot)
                    else:
                        refused.append(refusal)
                features_TC[filled:] = 0
                checksum = zlib.crc32(features_TC, checksum)  # while it is in the processor's cache
            if small["valid"].any():
                yield PaddedGroup(group.bucket, group.pass_number, features_BTC, checksum, small, blocks_B)
    finally:
        for handle in handles.values():
            handle.close()


def _open(handles: dict[int, h5py.File], files: Sequence[SessionFile], number: int) -> h5py.File:
    if number not in handles:
        if len(handles) == _MOST_OPEN:
            handles.pop(next(iter(handles))).close()
        handles[number] = open_session_file(files[number])
    return handles[number]


def _empty_slots(group: PlannedGroup, bucket: Bucket, group_size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    width = max(len(trial.trial_id.encode()) for trial in group.trials)
    small = {
        "input_bins": np.zeros(group_size, np.int32),
        "labels": np.zeros((group_size, bucket.label_slots), np.int32),
        "label_lengths": np.zeros(group_size, np.int32),
        "required_steps": np.zeros(group_size, np.int32),
        "days": np.zeros(group_size, np.int32),
        "valid": np.zeros(group_size, np.uint8),
        "trial_ids": np.zeros(group_size, f"S{width}"),
    }
    return small, np.full(group_size, UNKNOWN_BLOCK, np.int32)


def _fill_slot(small: dict[str, np.ndarray], blocks_B: np.ndarray, group: PlannedGroup, slot: int) -> None:
    trial = group.trials[slot]
    small["input_bins"][slot] = trial.input_bins
    small["labels"][slot, : len(trial.labels)] = trial.labels
    small["label_lengths"][slot] = len(trial.labels)
    small["required_steps"][slot] = trial.required_steps
    small["days"][slot] = trial.day
    small["valid"][slot] = 1
    small["trial_ids"][slot] = trial.trial_id.encode()
    blocks_B[slot] = trial.block
