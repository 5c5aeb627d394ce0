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
