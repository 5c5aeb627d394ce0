"""Trials in the layout of the public brain-to-text data, read as they are. docs/FORMAT.md describes the layout.

In: a folder of sessions, each with `data_{train,val,test}.hdf5`. Out: one trial at a time, checked, or a `Refusal` that
says why it cannot be used. What a decoder needs beyond that (enough bins for a patch, enough steps for a label) is left
to `prebatch`, and so is which number of features the participant has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from xla_b2t.data import bfloat16
from xla_b2t.data.phonemes import NUM_CLASSES, PHONEMES
from xla_b2t.errors import UserError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SessionFile:
    """One split of one session."""

    session: str
    split: str
    path: str


@dataclass(frozen=True)
class Source:
    """A folder: its files in the order of sessions and splits, and the folders and HDF5 files that were passed over."""

    folder: str
    sessions: tuple[str, ...]
    files: tuple[SessionFile, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Trial:
    """One sentence.

    Attributes:
        trial_id: `session/split/trial`.
        features_TC: float32 (T, C), finite.
        labels_L: int32 (L,), classes 1 to 40 without padding, L at least 1; None without labels.
    """

    trial_id: str
    features_TC: np.ndarray
    labels_L: np.ndarray | None


@dataclass(frozen=True)
class Refusal:
    """A trial that cannot be used: `reason` is a word to count by, `detail` has the values."""

    trial_id: str
    reason: str
    detail: str

    @property
    def split(self) -> str:
        """The split it belongs to."""
        return self.trial_id.split("/")[1]


def find_sessions(folder: str | Path) -> Source:
    """Lists the session files directly below a folder; a session's place in the list of names is its day.

    Raises:
        UserError: no such folder, or no session in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError("there is no such folder", str(root), "give the folder that holds the session folders")
    files, ignored = [], []
    for child in sorted(root.iterdir()):
        found = [SessionFile(child.name, split, str(child / f"data_{split}.hdf5")) for split in SPLITS]
        found = [file for file in found if Path(file.path).is_file()]
        files += found
        known = {Path(file.path).name for file in found}
        if child.is_dir() and not found:
            ignored.append(child.name)
        elif child.is_dir():
            others = {path.name for path in child.iterdir() if path.suffix in (".hdf5", ".h5", ".partial")} - known
            ignored += [f"{child.name}/{other}" for other in sorted(others)]
    if not files:
        deeper = sorted({str(path.parent.parent) for path in root.glob("*/*/data_*.hdf5")})
        fix = f"give {deeper[0]}" if deeper else "give the folder that holds the session folders, or run xla_b2t synth"
        raise UserError("no session here: expected <session>/data_train.hdf5", str(root), fix)
    sessions = tuple(sorted({file.session for file in files}))
    return Source(str(root), sessions, tuple(files), tuple(ignored))


def open_session_file(file: SessionFile) -> h5py.File:
    """Opens the file of a session for reading.

    Raises:
        UserError: it is not HDF5, or truncated.
    """
    try:
        return h5py.File(file.path, "r")
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error}", file.path, "copy or download it again, or move the session away"
        ) from None


def read_trials(file: SessionFile) -> Iterator[Trial | Refusal]:
    """Reads and checks every trial of a file in the order of their names, one at a time.

    Labels are required in `train` and `val`. In `test` they are read where they are, and may be absent.

    Raises:
        UserError: the file cannot be opened.
    """
    with open_session_file(file) as handle:
        for name in sorted(handle):
            yield read_trial(handle, file, name)


def read_trial(handle: h5py.File, file: SessionFile, name: str) -> Trial | Refusal:
    """Reads and checks one trial of an open file."""
    trial_id = f"{file.session}/{file.split}/{name}"
    try:
        node = handle[name]
        if not isinstance(node, h5py.Group) or not name.startswith("trial_"):
            return Refusal(trial_id, "not_a_trial", "expected a group named trial_NNNN")
        features_TC = _read_features(node)
        labelled = file.split != "test" or "seq_class_ids" in node or "seq_len" in node.attrs
        labels_L = _read_labels(node) if labelled else None
    except _Fault as fault:
        return Refusal(trial_id, *fault.args)
    except (OSError, RuntimeError) as error:
        return Refusal(trial_id, "unreadable", str(error))
    return Trial(trial_id, features_TC, labels_L)


class _Fault(Exception):
    """Why a trial is refused: (reason, detail). It never leaves this module."""


def _read_features(node: h5py.Group) -> np.ndarray:
    stored = _dataset(node, "input_features")
    if stored.ndim != 2 or stored.shape[1] == 0:
        raise _Fault("wrong_shape", f"input_features is {stored.shape}, expected (time steps, features)")
    if not np.issubdtype(stored.dtype, np.floating):
        raise _Fault("wrong_type", f"input_features is {stored.dtype}, expected floating point")
    num_steps = _integer_attribute(node, "n_time_steps")
    if num_steps != stored.shape[0]:
        raise _Fault("wrong_length", f"n_time_steps is {num_steps}, but input_features has {stored.shape[0]} rows")
    features_TC = np.asarray(stored[()])
    largest = max(-float(features_TC.min(initial=0)), float(features_TC.max(initial=0)))  # NaN makes both NaN
    if not np.isfinite(largest):
        bins, columns = np.nonzero(~np.isfinite(features_TC))
        detail = f"{len(bins)} NaN or infinite values, the first in bin {bins[0]}, feature {columns[0]}"
        raise _Fault("not_finite", detail)
    if largest > bfloat16.LARGEST:
        raise _Fault("not_finite", f"{largest:.4g} is beyond the largest bfloat16, {bfloat16.LARGEST:.4g}")
    return features_TC.astype(np.float32, copy=False)


def _read_labels(node: h5py.Group) -> np.ndarray:
    stored = _dataset(node, "seq_class_ids")
    if stored.ndim != 1:
        raise _Fault("wrong_shape", f"seq_class_ids is {stored.shape}, expected one dimension")
    if not np.issubdtype(stored.dtype, np.integer):
        raise _Fault("wrong_type", f"seq_class_ids is {stored.dtype}, expected integers")
    length = _integer_attribute(node, "seq_len")
    if length > stored.shape[0]:
        raise _Fault("wrong_label_length", f"seq_len is {length}, but seq_class_ids has {stored.shape[0]} places")
    if length < 1:
        raise _Fault("wrong_label_length", f"seq_len is {length}, expected at least one phoneme")
    labels_L = stored[:length]
    outside = np.flatnonzero((labels_L < 1) | (labels_L >= NUM_CLASSES))
    if len(outside):
        place = int(outside[0])
        expected = f"1 ({PHONEMES[1]}) to {NUM_CLASSES - 1} ({PHONEMES[-1]})"
        raise _Fault("class_out_of_range", f"seq_class_ids[{place}] is {labels_L[place]}, expected {expected}")
    return labels_L.astype(np.int32)


def _dataset(node: h5py.Group, name: str) -> h5py.Dataset:
    if name not in node:
        raise _Fault("missing_dataset", name)
    if not isinstance(node[name], h5py.Dataset):
        raise _Fault("missing_dataset", f"{name} is a group, expected a dataset")
    return node[name]


def _integer_attribute(node: h5py.Group, name: str) -> int:
    if name not in node.attrs:
        raise _Fault("missing_attribute", name)
    value = np.asarray(node.attrs[name])
    if value.size != 1 or not np.issubdtype(value.dtype, np.integer):
        raise _Fault("wrong_type", f"attribute {name} is {node.attrs[name]!r}, expected one integer")
    return int(value.reshape(()))
