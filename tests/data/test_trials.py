import os

import h5py
import numpy as np
import pytest

from xla_b2t.data import bfloat16
from xla_b2t.data.trials import Refusal, Trial, find_sessions, open_session_file, read_features, read_trials
from xla_b2t.errors import UserError

GOOD = {"features": np.arange(320, dtype=np.float32).reshape(40, 8), "labels": [7, 28, 17, 40]}


def with_value(value):
    features = np.zeros((40, 8), np.float32)
    features[3, 5] = value
    return features


def read_only_trial(folder):
    """The only trial of a folder, and its bits; a refusal alone."""
    (file,) = find_sessions(folder).files
    (found,) = read_trials(file)
    if isinstance(found, Refusal):
        return found
    features_TC = np.empty((found.num_bins, found.num_features), np.float32)
    bits_TC = np.empty(features_TC.shape, np.uint16)
    with open_session_file(file) as handle:
        return read_features(handle, found.trial_id, features_TC, bits_TC) or (found, bits_TC)


def test_read_trials_good_trial_comes_as_it_is(write_trials):
    trial, bits_TC = read_only_trial(write_trials({**GOOD, "block_num": 7}))
    assert isinstance(trial, Trial)
    assert trial.trial_id == "t15.2023.08.11/train/trial_0000"
    assert (trial.num_bins, trial.num_features, trial.block) == (40, 8, 7)
    np.testing.assert_array_equal(bits_TC, bfloat16.to_bits(GOOD["features"]))
    assert trial.labels_L.dtype == np.int32
    assert trial.labels_L.tolist() == GOOD["labels"]


def test_read_trials_without_a_block_is_of_an_unknown_one(write_trials):
    assert read_only_trial(write_trials(GOOD))[0].block == -1


@pytest.mark.parametrize("dtype", ["<f2", "<f8", ">f4", ">f8"])
def test_read_features_of_other_floats_are_rounded_from_float32(write_trials, dtype):
    _, bits_TC = read_only_trial(write_trials({"features": GOOD["features"].astype(dtype)}))
    np.testing.assert_array_equal(bits_TC, bfloat16.to_bits(GOOD["features"]))


def test_read_trials_test_split_needs_no_labels(write_trials):
    trial, _ = read_only_trial(write_trials({"features": GOOD["features"]}, split="test"))
    assert trial.labels_L is None


def test_read_trials_test_split_reads_labels_where_they_are(write_trials):
    assert read_only_trial(write_trials(GOOD, split="test"))[0].labels_L.tolist() == GOOD["labels"]


@pytest.mark.parametrize(
    ("trial", "reason", "detail"),
    [
        ({"leave_out": ["input_features"]}, "missing_dataset", "input_features"),
        ({"leave_out": ["seq_class_ids"]}, "missing_dataset", "seq_class_ids"),
        ({"leave_out": ["n_time_steps"]}, "missing_attribute", "n_time_steps"),
        ({"leave_out": ["seq_len"]}, "missing_attribute", "seq_len"),
        ({"features": np.zeros(40, np.float32)}, "wrong_shape", "input_features is (40,)"),
        ({"features": np.zeros((40, 0), np.float32)}, "wrong_shape", "input_features is (40, 0)"),
        ({"features": np.zeros((40, 8), np.int16)}, "wrong_type", "input_features is int16"),
        ({"n_time_steps": 41}, "wrong_length", "n_time_steps is 41, but input_features has 40 rows"),
        ({"n_time_steps": 40.5}, "wrong_type", "attribute n_time_steps is"),
        ({"n_time_steps": [40, 40]}, "wrong_type", "attribute n_time_steps is"),
        ({"features": with_value(np.nan)}, "not_finite", "1 NaN or infinite values, the first in bin 3, feature 5"),
        ({"features": with_value(-np.inf)}, "not_finite", "the first in bin 3, feature 5"),
        ({"features": with_value(3.4e38)}, "not_finite", "beyond the largest bfloat16"),
        ({"labels": [7, 41]}, "class_out_of_range", "seq_class_ids[1] is 41, expected 1 (AA) to 40 (SIL)"),
        ({"labels": [0, 7]}, "class_out_of_range", "seq_class_ids[0] is 0"),
        ({"labels": [7, -3]}, "class_out_of_range", "seq_class_ids[1] is -3"),
        ({"labels": [7], "seq_len": 3}, "class_out_of_range", "seq_class_ids[1] is 0"),
        ({"labels": [7], "seq_len": 21}, "wrong_label_length", "seq_len is 21, but seq_class_ids has 20 places"),
        ({"labels": [7], "seq_len": 0}, "wrong_label_length", "seq_len is 0, expected at least one"),
        ({"labels": [7.0, 8.0]}, "wrong_type", "seq_class_ids is float64"),
        ({"labels": [[7], [8]]}, "wrong_shape", "seq_class_ids is (2, 1)"),
        ({"name": "notes"}, "not_a_trial", "trial_NNNN"),
        ({"block_num": "first"}, "wrong_type", "attribute block_num is"),
        ({"block_num": -7}, "wrong_type", "block_num is -7"),
    ],
)
def test_read_trials_faulty_trial_is_refused_with_its_reason(write_trials, trial, reason, detail):
    refusal = read_only_trial(write_trials(trial))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert detail in refusal.detail
    assert refusal.trial_id == f"t15.2023.08.11/train/{trial.get('name', 'trial_0000')}"
    assert refusal.split == "train"


def test_read_trials_group_in_place_of_a_dataset_is_refused(write_trials):
    folder = write_trials({"leave_out": ["input_features"]})
    with h5py.File(folder / "t15.2023.08.11" / "data_train.hdf5", "a") as file:
        file.create_group("trial_0000/input_features")
    assert read_only_trial(folder).reason == "missing_dataset"


def test_read_trials_damaged_chunk_is_refused_as_unreadable(write_trials):
    folder = write_trials({"leave_out": ["input_features"]})
    path = folder / "t15.2023.08.11" / "data_train.hdf5"
    with h5py.File(path, "a") as file:
        dataset = file["trial_0000"].create_dataset(
            "input_features", data=np.ones((40, 8), np.float32), compression="gzip"
        )
        offset = dataset.id.get_chunk_info(0).byte_offset
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 16)
    assert read_only_trial(folder).reason == "unreadable"


def test_read_trials_file_that_is_no_hdf5_is_a_user_error(write_trials):
    folder = write_trials(GOOD)
    path = folder / "t15.2023.08.11" / "data_train.hdf5"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError) as raised:
        read_only_trial(folder)
    assert "the file cannot be read" in raised.value.what
    assert raised.value.where == str(path)
    assert "download it again" in raised.value.fix


def test_find_sessions_lists_sessions_by_name_and_what_it_passed_over(write_trials):
    write_trials(GOOD, session="t15.2023.09.01", split="val")
    folder = write_trials(GOOD, session="t15.2023.08.11")
    (folder / "figures").mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "t15.2023.08.11" / "data_extra.hdf5").write_bytes(b"x")
    source = find_sessions(folder)
    assert source.sessions == ("t15.2023.08.11", "t15.2023.09.01")
    assert [(file.session, file.split) for file in source.files] == [
        ("t15.2023.08.11", "train"),
        ("t15.2023.09.01", "val"),
    ]
    assert source.ignored == ("figures", "t15.2023.08.11/data_extra.hdf5")


def test_find_sessions_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError) as raised:
        find_sessions(tmp_path / "nowhere")
    assert raised.value.what == "there is no such folder"
    assert raised.value.where == str(tmp_path / "nowhere")
    assert "session folders" in raised.value.fix


def test_find_sessions_folder_above_says_the_right_one(write_trials):
    folder = write_trials(GOOD)
    with pytest.raises(UserError) as raised:
        find_sessions(folder.parent)
    assert "no session here" in raised.value.what
    assert raised.value.where == str(folder.parent)
    assert raised.value.fix == f"give {folder}"


def test_find_sessions_empty_folder_points_to_the_simulation(tmp_path):
    with pytest.raises(UserError, match="no session here") as raised:
        find_sessions(tmp_path)
    assert "xla_b2t synth" in raised.value.fix


def odd_file(write_trials, change, trials=2):
    """A file of good trials after `change(file, first)`, and what was kept and refused of it."""
    folder = write_trials(*[GOOD] * trials)
    with h5py.File(folder / "t15.2023.08.11" / "data_train.hdf5", "a") as file:
        change(file, file["trial_0000"])
    (file,) = find_sessions(folder).files
    found = list(read_trials(file))
    return [t.trial_id for t in found if isinstance(t, Trial)], [t for t in found if isinstance(t, Refusal)]


def replaced(node, name, *args, **options):
    del node[name]
    return node.create_dataset(name, *args, **options)


def compound(node, name):
    replaced(node, name, data=np.zeros(40, [("x", "f4"), ("y", "i8")]))


def virtual(file, node):
    layout = h5py.VirtualLayout((40, 8), "f4")
    layout[:] = h5py.VirtualSource("nowhere.h5", "features", (40, 8))
    del node["input_features"]
    node.create_virtual_dataset("input_features", layout)


def partly_written(file, node):
    replaced(node, "input_features", (40, 8), "f4", chunks=(10, 8))[:20] = 1


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (lambda f, n: replaced(n, "input_features", (1 << 40, 512), "f4", chunks=(1, 512)), "wrong_length", "40"),
        (lambda f, n: (replaced(n, "input_features", (1 << 40, 512), "f4", chunks=(1, 512)),
                       n.attrs.modify("n_time_steps", 1 << 40)), "wrong_shape", "more than a trial can be"),
        (lambda f, n: replaced(n, "input_features", (40, 8), "f4"), "wrong_shape", "ever written"),
        (partly_written, "wrong_shape", "not all of it was ever written"),
        (virtual, "wrong_shape", "ever written"),
        (lambda f, n: replaced(n, "input_features", (40, 8), "f4", maxshape=(None, None), chunks=(1 << 20, 1 << 7)),
         "wrong_shape", "in chunks of"),
        (lambda f, n: compound(n, "input_features"), "wrong_shape", "(40,)"),
        (lambda f, n: compound(n, "seq_class_ids"), "wrong_type", "seq_class_ids is"),
        (lambda f, n: replaced(n, "seq_class_ids", data=f.ref, dtype=h5py.ref_dtype), "wrong_shape", "()"),
        (lambda f, n: replaced(n, "seq_class_ids", data=[f.ref] * 3, dtype=h5py.ref_dtype), "wrong_type", "object"),
        (lambda f, n: replaced(n, "seq_class_ids", data=["a"] * 9), "wrong_type", "object"),
        (lambda f, n: n.attrs.__setitem__("seq_len", np.uint64(2**64 - 1)), "wrong_label_length", "1844674407"),
        (lambda f, n: n.attrs.__setitem__("seq_len", f.ref), "wrong_type", "attribute seq_len"),
        (lambda f, n: n.attrs.__setitem__("n_time_steps", h5py.Empty("i4")), "wrong_type", "attribute n_time_steps"),
        (lambda f, n: n.attrs.__setitem__("n_time_steps", "forty"), "wrong_type", "attribute n_time_steps"),
        (lambda f, n: n.attrs.__setitem__("n_time_steps", np.zeros(8000, "i8")), "wrong_type", "(8000,)"),
        (lambda f, n: n.attrs.__setitem__("block_num", 1 << 40), "wrong_type", "block_num is 1099511627776"),
        (lambda f, n: (n.pop("input_features"), n.__setitem__("input_features", h5py.SoftLink("/no"))),
         "missing_dataset", "input_features"),
        (lambda f, n: (n.pop("seq_class_ids"), n.__setitem__("seq_class_ids", h5py.ExternalLink("no.h5", "/x"))),
         "missing_dataset", "seq_class_ids"),
    ],
)  # fmt: skip
def test_read_trials_odd_trial_is_refused_and_the_others_are_kept(write_trials, change, reason, detail):
    kept, (refusal,) = odd_file(write_trials, change)
    assert kept == ["t15.2023.08.11/train/trial_0001"]
    assert (refusal.trial_id, refusal.reason) == ("t15.2023.08.11/train/trial_0000", reason)
    assert detail in refusal.detail


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f, n: f.__setitem__("trial_9", h5py.SoftLink("/nowhere")), "unreadable"),
        (lambda f, n: f.__setitem__("trial_9", h5py.ExternalLink("nowhere.h5", "/trial_0000")), "unreadable"),
        (lambda f, n: f.__setitem__("trial_9", n), "duplicate"),
        (lambda f, n: f.__setitem__("trial_9", h5py.SoftLink("/trial_0000")), "duplicate"),
        (lambda f, n: f.__setitem__("trial_9", np.zeros(3)), "not_a_trial"),
        (lambda f, n: f.__setitem__("trial_9", np.dtype("f4")), "not_a_trial"),
        (lambda f, n: h5py.h5g.create(f.id, b"trial_\xff\xfe"), "not_a_trial"),
    ],
)
def test_read_trials_entry_that_is_no_trial_of_its_own_is_refused(write_trials, change, reason):
    kept, (refusal,) = odd_file(write_trials, change)
    assert len(kept) == 2
    assert refusal.reason == reason
    refusal.trial_id.encode()


def test_read_trials_attributes_that_nobody_needs_may_be_anything(write_trials):
    def change(file, node):
        node.attrs["sentence_label"] = np.bytes_(b"\xff\xfe")
        node.attrs["session"] = h5py.Empty("f4")
        node.attrs["trial_num"] = np.zeros(3, [("a", "i4")])

    assert odd_file(write_trials, change) == (
        ["t15.2023.08.11/train/trial_0000", "t15.2023.08.11/train/trial_0001"],
        [],
    )


def test_read_features_that_are_not_as_they_were_are_refused(write_trials):
    folder = write_trials(GOOD)
    (file,) = find_sessions(folder).files
    with open_session_file(file) as handle:
        features_TC = np.empty((41, 8), np.float32)
        bits_TC = np.empty((41, 8), np.uint16)
        changed = read_features(handle, "t15.2023.08.11/train/trial_0000", features_TC, bits_TC)
        assert (changed.reason, changed.detail) == ("wrong_shape", "input_features was (41, 8), and is (40, 8) now")
        gone = read_features(handle, "t15.2023.08.11/train/trial_0001", features_TC, bits_TC)
        assert gone.reason == "unreadable"


def test_find_sessions_name_that_is_not_utf8_is_a_user_error(tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/t15.\xff")
    with pytest.raises(UserError) as raised:
        find_sessions(tmp_path)
    assert raised.value.what == "a name is not UTF-8: 't15.\\udcff'"
    assert (raised.value.where, raised.value.fix) == (str(tmp_path), "rename it, or move it away")
