"""Trials in the layout of the public brain-to-text data, read as they are. docs/FORMAT.md describes the layout.

In: a folder of sessions, each with `data_{train,val,test}.hdf5`. Out: one trial at a time, checked, or a `Refusal` that
says why it cannot be used; its features apart from the rest, because they are read once and much larger. What a decoder
needs beyond that (enough bins for a patch, enough steps for a label) is left to `scan`, and so is which number of
features the participant has.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5o, h5s, h5t

from xla_b2t.data import bfloat16
from xla_b2t.data.group_format import UNKNOWN_BLOCK
from xla_b2t.data.phonemes import NUM_CLASSES, PHONEMES
from xla_b2t.errors import UserError

SPLITS = ("train", "val", "test")

MOST_BYTES = 1 << 26
"""Of a trial's features in float32: 32,768 bins of 512, eleven minutes. A file that claims more is not believed."""

_MOST_LABELS = 1 << 16
_ODD = (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError)
"""What h5py raises where a file is not what it says."""


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
    """One sentence without its features.

    Attributes:
        trial_id: `session/split/trial`.
        num_bins: T.
        num_features: C.
        labels_L: int32 (L,), classes 1 to 40 without padding, L at least 1; None without labels.
        block: of the session, -1 where it is unknown.
    """

    trial_id: str
    num_bins: int
    num_features: int
    labels_L: np.ndarray | None
    block: int


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
        if child.name.encode("utf-8", "backslashreplace").decode() != child.name:
            raise UserError(f"a name is not UTF-8: {child.name!r}", str(root), "rename it, or move it away")
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
    except _ODD as error:
        raise _unreadable(file, error) from None


def read_trials(file: SessionFile) -> Iterator[Trial | Refusal]:
    """Checks every trial of a file in the order of their names, one at a time; features are not read.

    Labels are required in `train` and `val`. In `test` they are read where they are, and may be absent.

    Raises:
        UserError: the file cannot be opened or listed.
    """
    seen: dict[tuple[int, int], str] = {}
    with open_session_file(file) as handle:
        try:
            names = sorted(handle.id)
        except _ODD as error:
            raise _unreadable(file, error) from None
        for name in names:
            yield _read_trial(handle, file, name, seen)


def read_features(handle: h5py.File, trial_id: str, features_TC: np.ndarray, bits_TC: np.ndarray) -> Refusal | None:
    """Reads the features of one trial of an open file, checks them and rounds them to bfloat16.

    Args:
        handle: the file.
        trial_id: `session/split/trial`, found by `read_trials`.
        features_TC: float32 (T, C), overwritten.
        bits_TC: uint16 (T, C), written; it means nothing when the trial is refused.
    """
    try:
        stored = h5d.open(handle.id, f"{trial_id.split('/', 2)[2]}/input_features".encode())
        if stored.shape != features_TC.shape:
            raise _Fault("wrong_shape", f"input_features was {features_TC.shape}, and is {stored.shape} now")
        _read_into(stored, features_TC)
        if not bfloat16.write_bits(features_TC, bits_TC):
            raise _not_finite(features_TC)
    except _Fault as fault:
        return Refusal(trial_id, *fault.args)
    except _ODD as error:
        return Refusal(trial_id, "unreadable", _in_words(error))
    return None


class _Fault(Exception):
    """Why a trial is refused: (reason, detail). It never leaves this module."""


def _read_trial(handle: h5py.File, file: SessionFile, name: bytes, seen: dict[tuple[int, int], str]) -> Trial | Refusal:
    printable = name.decode("utf-8", "backslashreplace")
    trial_id = f"{file.session}/{file.split}/{printable}"
    if printable.encode() != name:
        return Refusal(trial_id, "not_a_trial", "the name is not UTF-8")
    try:
        node = h5o.open(handle.id, name)
        if not isinstance(node, h5g.GroupID) or not name.startswith(b"trial_"):
            return Refusal(trial_id, "not_a_trial", "expected a group named trial_NNNN")
        about = h5o.get_info(node)
        first = seen.setdefault((about.fileno, about.addr), printable)
        if first != printable:
            return Refusal(trial_id, "duplicate", f"the same trial as {first}")
        num_bins, num_features = _features_shape(node)
        labelled = file.split != "test" or b"seq_class_ids" in node or h5a.exists(node, b"seq_len")
        labels_L = _read_labels(node) if labelled else None
        block = _integer_attribute(node, "block_num") if h5a.exists(node, b"block_num") else UNKNOWN_BLOCK
        if not -1 <= block < 1 << 31:
            raise _Fault("wrong_type", f"block_num is {block}, expected a number of a block")
    except _Fault as fault:
        return Refusal(trial_id, *fault.args)
    except _ODD as error:
        return Refusal(trial_id, "unreadable", _in_words(error))
    return Trial(trial_id, num_bins, num_features, labels_L, block)


def _features_shape(node: h5g.GroupID) -> tuple[int, int]:
    stored = _dataset(node, "input_features")
    shape, kind = stored.shape, stored.get_type()
    if len(shape) != 2 or shape[1] == 0:
        raise _Fault("wrong_shape", f"input_features is {shape}, expected (time steps, features)")
    if kind.get_class() != h5t.FLOAT:
        raise _Fault("wrong_type", f"input_features is {_type_in_words(kind)}, expected floating point")
    num_steps = _integer_attribute(node, "n_time_steps")
    if num_steps != shape[0]:
        raise _Fault("wrong_length", f"n_time_steps is {num_steps}, but input_features has {shape[0]} rows")
    if 4 * math.prod(shape) > MOST_BYTES:
        raise _Fault("wrong_shape", f"input_features is {shape}, more than a trial can be")
    if not _is_written(stored):
        raise _Fault("wrong_shape", f"input_features is {shape}, but not all of it was ever written")
    return shape


def _is_written(stored: h5d.DatasetID) -> bool:
    """Whether there is a place in the file for every value; what has none would be read as zeros."""
    shape, properties = stored.shape, stored.get_create_plist()
    if math.prod(shape) == 0:
        return True
    layout = properties.get_layout()
    if layout != h5d.CHUNKED:
        return layout != h5d.VIRTUAL and stored.get_storage_size() > 0
    chunk = properties.get_chunk()
    if stored.get_type().get_size() * math.prod(chunk) > 4 * MOST_BYTES:
        raise _Fault("wrong_shape", f"input_features is in chunks of {chunk}, more than a trial can be")
    expected = math.prod(-(-length // of_chunk) for length, of_chunk in zip(shape, chunk, strict=True))
    return stored.get_num_chunks() == expected


def _read_into(stored: h5d.DatasetID, features_TC: np.ndarray) -> None:
    if features_TC.size:
        stored.read(h5s.ALL, h5s.ALL, features_TC, h5t.NATIVE_FLOAT)


def _not_finite(features_TC: np.ndarray) -> _Fault:
    bins, columns = np.nonzero(~np.isfinite(features_TC))
    if len(bins):
        detail = f"{len(bins)} NaN or infinite values, the first in bin {bins[0]}, feature {columns[0]}"
        return _Fault("not_finite", detail)
    largest = np.abs(features_TC).max()
    return _Fault("not_finite", f"{largest:.4g} is beyond the largest bfloat16, {bfloat16.LARGEST:.4g}")


def _read_labels(node: h5g.GroupID) -> np.ndarray:
    stored = _dataset(node, "seq_class_ids")
    shape, kind = stored.shape, stored.get_type()
    if len(shape) != 1:
        raise _Fault("wrong_shape", f"seq_class_ids is {shape}, expected one dimension")
    if kind.get_class() != h5t.INTEGER:
        raise _Fault("wrong_type", f"seq_class_ids is {_type_in_words(kind)}, expected integers")
    length = _integer_attribute(node, "seq_len")
    if length > shape[0]:
        raise _Fault("wrong_label_length", f"seq_len is {length}, but seq_class_ids has {shape[0]} places")
    if not 1 <= length <= _MOST_LABELS:
        raise _Fault(
            "wrong_label_length", f"seq_len is {length}, expected at least one phoneme, at most {_MOST_LABELS}"
        )
    labels_L = np.empty(length, np.int64)  # a class beyond it is held at its end, and refused all the same
    place = stored.get_space()
    place.select_hyperslab((0,), (length,))
    stored.read(h5s.create_simple((length,)), place, labels_L, h5t.NATIVE_INT64)
    outside = np.flatnonzero((labels_L < 1) | (labels_L >= NUM_CLASSES))
    if len(outside):
        place = int(outside[0])
        expected = f"1 ({PHONEMES[1]}) to {NUM_CLASSES - 1} ({PHONEMES[-1]})"
        raise _Fault("class_out_of_range", f"seq_class_ids[{place}] is {labels_L[place]}, expected {expected}")
    return labels_L.astype(np.int32)


def _dataset(node: h5g.GroupID, name: str) -> h5d.DatasetID:
    try:
        found = h5o.open(node, name.encode())
    except KeyError as error:
        raise _Fault("missing_dataset", f"{name}: {_in_words(error)}") from None
    if not isinstance(found, h5d.DatasetID):
        raise _Fault("missing_dataset", f"{name} is not a dataset")
    return found


def _integer_attribute(node: h5g.GroupID, name: str) -> int:
    if not h5a.exists(node, name.encode()):
        raise _Fault("missing_attribute", name)
    stored = h5a.open(node, name.encode())
    kind = stored.get_type()
    # Its size is asked before it is read: an attribute may claim any.
    if kind.get_class() != h5t.INTEGER or stored.get_space().get_simple_extent_npoints() != 1:
        found = f"{_type_in_words(kind)} {stored.shape}"
        raise _Fault("wrong_type", f"attribute {name} is {found}, expected one integer")
    value = np.zeros(stored.shape, stored.dtype)
    stored.read(value)
    return int(value.reshape(()))


def _type_in_words(kind: h5t.TypeID) -> str:
    try:
        return str(kind.dtype)
    except _ODD:
        return "of a type that NumPy does not have"


def _in_words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unreadable(file: SessionFile, error: BaseException) -> UserError:
    return UserError(
        f"the file cannot be read: {_in_words(error)}",
        file.path,
        "copy or download it again, or move the session away",
    )
