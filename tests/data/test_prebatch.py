import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from xla_b2t.data import bfloat16
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.phonemes import required_steps
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.errors import UserError

SMALL = PrebatchSettings(group_size=2, num_buckets=2, patch_bins=4, patch_stride=2)


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_prebatch_every_trial_is_stored_once_as_it_was(simulation, conversion):
    group_set = open_group_set(conversion.folder)
    for split, index in group_set.splits.items():
        seen = []
        with GroupReader(group_set, split) as reader:
            for group, bucket in enumerate(index.bucket_G):
                batch = reader.read([group], bucket)
                for slot in np.flatnonzero(batch.valid_B):
                    session, of_split, name = batch.trial_ids[slot].split("/")
                    assert of_split == split
                    assert group_set.sessions[batch.days_B[slot]] == session
                    seen.append((session, name))
                    with h5py.File(simulation / session / f"data_{split}.hdf5", "r") as file:
                        trial = file[name]
                        bins = trial.attrs["n_time_steps"]
                        labels = (
                            trial["seq_class_ids"][: trial.attrs["seq_len"]] if split != "test" else np.zeros(0, int)
                        )
                        features = trial["input_features"][()]
                    assert batch.input_bins_B[slot] == bins
                    np.testing.assert_array_equal(batch.features_BTC[slot, :bins], bfloat16.to_bits(features))
                    assert not batch.features_BTC[slot, bins:].any()
                    assert batch.label_lengths_B[slot] == len(labels)
                    np.testing.assert_array_equal(batch.labels_BL[slot, : len(labels)], labels)
                    assert not batch.labels_BL[slot, len(labels) :].any()
                    assert batch.required_steps_B[slot] == required_steps(labels)
                empty = np.flatnonzero(~batch.valid_B)
                assert not batch.features_BTC[empty].any()
                assert not batch.input_bins_B[empty].any()
                assert {batch.trial_ids[slot] for slot in empty} <= {""}
        expected = []
        for session in group_set.sessions:
            with h5py.File(simulation / session / f"data_{split}.hdf5", "r") as file:
                expected += [(session, name) for name in file]
        assert sorted(seen) == sorted(expected)


def test_prebatch_same_source_gives_the_same_bytes(simulation, conversion, tmp_path):
    settings = PrebatchSettings(group_size=4, num_buckets=3, patch_bins=4, patch_stride=2)
    prebatch(simulation, tmp_path / "again", settings)
    assert hashes(tmp_path / "again") == hashes(Path(conversion.folder))


def test_prebatch_any_number_of_workers_gives_the_same_bytes(write_trials, tmp_path):
    generator = np.random.default_rng(0)
    for session in ("t15.2023.08.11", "t15.2023.08.13", "t15.2023.09.01"):
        features = [generator.normal(size=(int(bins), 256)) for bins in generator.integers(300, 900, 9)]
        features[4][7, 7] = np.nan
        folder = write_trials(*[{"features": of_trial} for of_trial in features], session=session)
    settings = replace(SMALL, file_mb=1, num_passes=2)
    here = prebatch(folder, tmp_path / "here", settings)
    there = prebatch(folder, tmp_path / "there", settings, num_workers=2)
    assert len(here.splits["train"].files) > 4
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")
    assert replace(here, folder="") == replace(there, folder="")


def test_prebatch_report_adds_up(conversion):
    group_set = open_group_set(conversion.folder)
    assert {name: split.trials_in for name, split in conversion.splits.items()} == {"train": 42, "val": 22, "test": 22}
    for name, split in conversion.splits.items():
        index = group_set.splits[name]
        assert split.trials_kept == split.trials_in == index.num_valid_G.sum() == sum(split.trials_per_bucket)
        assert split.groups == len(index.bucket_G) == sum(split.groups_per_bucket)
        assert split.padding_efficiency == pytest.approx(group_set.padding_efficiency(name))
        assert 0.4 < split.padding_efficiency < 1
        assert split.labelled == (name != "test")


def test_prebatch_refused_trials_are_counted_with_their_reasons(write_trials, tmp_path):
    folder = write_trials({}, {"labels": [99]}, {"labels": [0]}, {"n_time_steps": 3}, {"name": "trial_more"})
    report = prebatch(folder, tmp_path / "out", SMALL)
    assert report.refused_by_reason == {"class_out_of_range": 2, "wrong_length": 1}
    split = report.splits["train"]
    assert (split.trials_in, split.trials_kept) == (5, 2)
    manifest = json.loads((tmp_path / "out" / "report.json").read_text())
    assert manifest["refused_by_reason"] == report.refused_by_reason
    assert [refusal["trial_id"] for refusal in manifest["refused"]] == [
        f"t15.2023.08.11/train/trial_000{number}" for number in (1, 2, 3)
    ]


def test_prebatch_strict_with_a_refused_trial_is_a_user_error(write_trials, tmp_path):
    folder = write_trials({}, {"labels": [99]}, {"labels": [0]})
    with pytest.raises(UserError) as raised:
        prebatch(folder, tmp_path / "out", replace(SMALL, strict=True))
    assert raised.value.what.startswith(
        "2 trials cannot be used, the first t15.2023.08.11/train/trial_0001: class_out_of"
    )
    assert raised.value.where == str(folder)
    assert "--strict" in raised.value.fix
    assert not (tmp_path / "out").exists()


def test_prebatch_split_with_nothing_usable_is_a_user_error(write_trials, tmp_path):
    write_trials({})
    folder = write_trials({"labels": [99]}, split="val")
    with pytest.raises(UserError) as raised:
        prebatch(folder, tmp_path / "out", SMALL)
    assert raised.value.what.startswith("no trial of val can be used, the first t15.2023.08.11/val/trial_0000")
    assert raised.value.where == str(folder)
    assert raised.value.fix == "mend the trials"


def test_prebatch_source_without_trials_is_a_user_error(write_trials, tmp_path):
    with pytest.raises(UserError) as raised:
        prebatch(write_trials(), tmp_path / "out", SMALL)
    assert raised.value.what == "the session files hold no trial"
    assert "another folder" in raised.value.fix


def test_prebatch_over_groups_needs_overwrite(write_trials, tmp_path):
    folder = write_trials({}, {}, {})
    prebatch(folder, tmp_path / "out", SMALL)
    with pytest.raises(UserError) as raised:
        prebatch(folder, tmp_path / "out", replace(SMALL, group_size=3))
    assert raised.value.what.startswith(
        "there are groups here already, and they are of something else: group_size was 2"
    )
    assert raised.value.where == str(tmp_path / "out")
    assert "--overwrite" in raised.value.fix
    prebatch(folder, tmp_path / "out", replace(SMALL, overwrite=True, group_size=3))
    assert open_group_set(tmp_path / "out").group_size == 3


def test_prebatch_overwrite_removes_splits_that_are_gone(write_trials, tmp_path):
    folder = write_trials({})
    write_trials({}, split="val")
    prebatch(folder, tmp_path / "out", SMALL)
    (folder / "t15.2023.08.11" / "data_val.hdf5").unlink()
    prebatch(folder, tmp_path / "out", replace(SMALL, overwrite=True))
    assert sorted(hashes(tmp_path / "out")) == ["index.h5", "report.json", "source.json", "train-0000.h5"]


def test_prebatch_into_a_folder_with_other_things_is_a_user_error(write_trials, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError) as raised:
        prebatch(write_trials({}), tmp_path / "out", replace(SMALL, overwrite=True))
    assert raised.value.what == "the folder holds other things: thesis.tex"
    assert raised.value.where == str(tmp_path / "out")
    assert raised.value.fix == "give a folder of its own"


def test_prebatch_onto_a_file_is_a_user_error(write_trials, tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="this is a file"):
        prebatch(write_trials({}), tmp_path / "out", SMALL)


def test_prebatch_folder_that_cannot_be_made_is_a_user_error(write_trials, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError) as raised:
        prebatch(write_trials({}), tmp_path / "file" / "out", SMALL)
    assert "the folder cannot be made" in raised.value.what
    assert raised.value.where == str(tmp_path / "file" / "out")
    assert raised.value.fix == "choose another folder"


def test_prebatch_too_little_room_is_a_user_error_before_writing(write_trials, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError) as raised:
        prebatch(write_trials({}), tmp_path / "out", SMALL)
    assert "the groups need" in raised.value.what
    assert raised.value.where == str(tmp_path / "out")
    assert "make room" in raised.value.fix


def stop_after(trials):
    def progress(stage, done, total, done_bytes=0):
        if (stage, done) == ("write", trials):
            raise KeyboardInterrupt

    return progress


def test_prebatch_interrupted_while_writing_leaves_no_group_set_and_goes_on(write_trials, tmp_path):
    folder = write_trials(*[{"features": np.full((400, 256), value, np.float32)} for value in range(1, 9)])
    settings = replace(SMALL, file_mb=1)
    prebatch(folder, tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        prebatch(folder, tmp_path / "out", settings, stop_after(6))
    assert sorted(hashes(tmp_path / "out")) == ["source.json", "train-0000.h5"]
    with pytest.raises(UserError, match="the converter is still writing, or was interrupted"):
        open_group_set(tmp_path / "out")
    first = (tmp_path / "out" / "train-0000.h5").stat()
    report = prebatch(folder, tmp_path / "out", settings)
    assert report.notes == ("gone on with what was there: 1 of 2 files",)
    assert (tmp_path / "out" / "train-0000.h5").stat().st_mtime_ns == first.st_mtime_ns
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_prebatch_interrupted_with_a_source_that_has_changed_begins_anew(write_trials, tmp_path):
    folder = write_trials(*[{}] * 8)
    with pytest.raises(KeyboardInterrupt):
        prebatch(folder, tmp_path / "out", SMALL, stop_after(6))
    (tmp_path / "out" / "train-0000.h5").write_bytes(b"")
    write_trials(*[{}] * 9)
    report = prebatch(folder, tmp_path / "out", SMALL)
    assert report.notes == ("begun anew: t15.2023.08.11/data_train.hdf5 was changed",)
    assert report.splits["train"].trials_kept == 9


def test_prebatch_of_the_same_again_writes_nothing(write_trials, tmp_path):
    folder = write_trials({}, {"labels": [99]}, {})
    first = prebatch(folder, tmp_path / "out", SMALL)
    before = hashes(tmp_path / "out")
    again = prebatch(folder, tmp_path / "out", SMALL)
    assert again.notes == (
        "up to date: nothing has changed, nothing was written; --overwrite would write all of it again",
    )
    assert replace(again, notes=()) == first
    assert hashes(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["train-0001.h5", "index.h5", "report.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 200)])
def test_prebatch_of_the_same_again_mends_a_file_that_is_missing_or_cut_off(write_trials, tmp_path, name, damage):
    folder = write_trials(*[{"features": np.full((400, 256), value, np.float32)} for value in range(1, 9)])
    settings = replace(SMALL, file_mb=1)
    prebatch(folder, tmp_path / "out", settings)
    before = hashes(tmp_path / "out")
    damage(tmp_path / "out" / name)
    report = prebatch(folder, tmp_path / "out", settings)
    assert report.notes == (f"gone on with what was there: {1 if name.startswith('train') else 2} of 2 files",)
    assert hashes(tmp_path / "out") == before


def test_prebatch_over_groups_of_a_source_that_has_changed_names_what(write_trials, tmp_path):
    folder = write_trials({})
    prebatch(folder, tmp_path / "out", SMALL)
    write_trials({}, split="val")
    with pytest.raises(UserError) as raised:
        prebatch(folder, tmp_path / "out", SMALL)
    assert "t15.2023.08.11/data_val.hdf5 is new" in raised.value.what
    assert raised.value.where == str(tmp_path / "out")
    assert "--overwrite" in raised.value.fix


def test_prebatch_source_that_changes_meanwhile_is_a_user_error(write_trials, tmp_path):
    folder = write_trials({})

    def add(stage, done, total, done_bytes=0):
        if stage == "write" and done == total:
            os.utime(folder / "t15.2023.08.11" / "data_train.hdf5")

    with pytest.raises(UserError) as raised:
        prebatch(folder, tmp_path / "out", SMALL, add)
    assert raised.value.what == "the source changed meanwhile: t15.2023.08.11/data_train.hdf5 was changed"
    assert raised.value.where == str(folder)
    assert "prebatch again" in raised.value.fix
    assert not (tmp_path / "out" / "report.json").exists()


def test_prebatch_features_that_cannot_be_used_leave_an_empty_slot(write_trials, tmp_path):
    folder = write_trials({}, {"features": np.full((40, 8), np.nan)}, {}, {"features": np.full((90, 8), np.inf)})
    report = prebatch(folder, tmp_path / "out", replace(SMALL, num_passes=2))
    assert report.refused_by_reason == {"not_finite": 2}
    train = report.splits["train"]
    assert (train.trials_in, train.trials_kept, train.passes, train.groups) == (4, 2, 2, 4)
    group_set = open_group_set(tmp_path / "out")
    index = group_set.splits["train"]
    assert sorted(index.num_valid_G) == [1, 1, 1, 1]
    with GroupReader(group_set, "train") as reader:
        ids = {name for group in range(4) for name in reader.read([group], index.bucket_G[group]).trial_ids}
    assert ids == {"", "t15.2023.08.11/train/trial_0000", "t15.2023.08.11/train/trial_0002"}


@pytest.mark.parametrize(("strict", "what"), [(True, "2 trials cannot be used"), (False, "no trial of train can be")])
def test_prebatch_without_any_features_that_can_be_used_is_a_user_error(write_trials, tmp_path, strict, what):
    folder = write_trials(*[{"features": np.full((40, 8), np.nan)}] * 2)
    with pytest.raises(UserError, match=what) as raised:
        prebatch(folder, tmp_path / "out", replace(SMALL, strict=strict))
    assert raised.value.where == str(folder)
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(("name", "flag"), [("group_size", "--group-size"), ("num_buckets", "--buckets")])
def test_prebatch_settings_below_one_are_a_user_error(name, flag):
    with pytest.raises(UserError) as raised:
        PrebatchSettings(**{name: 0})
    assert raised.value.what == f"{name} is 0, expected at least 1"
    assert raised.value.where == flag
    assert raised.value.fix == "give 1 or more"
