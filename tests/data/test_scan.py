import numpy as np

from xla_b2t.data.scan import Needs, scan
from xla_b2t.data.trials import find_sessions
from xla_b2t.data.workers import Workers

NEEDS = Needs(patch_bins=14, patch_stride=4, num_features=0)


def run(folder, needs=NEEDS):
    return scan(find_sessions(folder), needs, Workers(0), lambda *_: None)


def reasons(found):
    return [(refusal.trial_id.rpartition("/")[2], refusal.reason) for refusal in found.refused]


def test_scan_trial_shorter_than_a_patch_is_refused(write_trials):
    found = run(
        write_trials(
            {"features": np.zeros((13, 8), np.float32)}, {"features": np.zeros((14, 8), np.float32), "labels": [5]}
        )
    )
    assert reasons(found) == [("trial_0000", "shorter_than_patch")]
    assert found.refused[0].detail == "13 bins, a patch needs 14"
    assert [trial.name for trial in found.kept["train"]] == ["trial_0001"]


def test_scan_label_that_fits_only_without_its_repeats_is_refused(write_trials):
    features = np.zeros((14 + 4 * 3, 8), np.float32)  # 4 steps
    found = run(
        write_trials({"features": features, "labels": [5, 6, 5, 6]}, {"features": features, "labels": [5, 6, 6, 5]})
    )
    assert reasons(found) == [("trial_0001", "label_longer_than_steps")]
    assert found.refused[0].detail == "4 phonemes with 1 adjacent repeats need 5 steps, 26 bins give 4"
    (kept,) = found.kept["train"]
    assert (kept.input_bins, kept.labels, kept.required_steps) == (26, (5, 6, 5, 6), 4)


def test_scan_other_number_of_features_than_most_is_refused(write_trials):
    wide = {"features": np.zeros((40, 16), np.float32)}
    found = run(write_trials(wide, {}, {}))
    assert found.num_features == 8
    assert reasons(found) == [("trial_0000", "wrong_feature_count")]
    assert found.refused[0].detail == "16 features, expected 8"


def test_scan_number_of_features_asked_for_overrules_most(write_trials):
    found = run(write_trials({"features": np.zeros((40, 16), np.float32)}, {}, {}), Needs(14, 4, 16))
    assert found.num_features == 16
    assert len(found.refused) == 2


def test_scan_test_split_with_some_labels_counts_as_unlabelled(write_trials):
    found = run(write_trials({}, {"labels": [3, 3]}, {"labels": [4]}, split="test"))
    assert found.labels_ignored == 2
    assert all(trial.labels == () and trial.required_steps == 0 for trial in found.kept["test"])


def test_scan_test_split_with_all_labels_keeps_them(write_trials):
    found = run(write_trials({"labels": [3, 3]}, {"labels": [4]}, split="test"))
    assert found.labels_ignored == 0
    assert [trial.labels for trial in found.kept["test"]] == [(3, 3), (4,)]


def test_scan_every_trial_is_kept_or_refused(write_trials):
    write_trials({}, {"labels": [99]}, session="t15.2023.08.13")
    found = run(write_trials({}, {"leave_out": ["seq_len"]}, {}, session="t15.2023.08.11", split="val"))
    assert {split: len(trials) for split, trials in found.kept.items()} == {"train": 1, "val": 2}
    assert {(r.split, r.reason) for r in found.refused} == {
        ("train", "class_out_of_range"),
        ("val", "missing_attribute"),
    }
    assert [trial.day for trial in found.kept["train"]] == [1]
