import datetime
import hashlib
import json
from dataclasses import replace

import h5py
import numpy as np
import pytest

from xla_b2t.data.phonemes import SILENCE
from xla_b2t.data.sentences import Lexicon
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError

FEATURES = 16
"""Of the shared simulation."""

TINY = SynthSettings(sessions=1, trials=3, features=8, bins_per_phoneme=2, silence_bins=4)


def all_trials(folder):
    for path in sorted(folder.glob("*/*.hdf5")):
        with h5py.File(path, "r") as file:
            for name, node in file.items():
                yield path, name, node


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_synthesize_layout_has_every_dataset_and_attribute_of_the_public_one(simulation):
    lexicon = Lexicon()
    for path, name, node in all_trials(simulation):
        features = node["input_features"]
        assert features.dtype == np.float32
        assert features.shape == (node.attrs["n_time_steps"], FEATURES)
        assert node.attrs["session"] == path.parent.name
        for attribute in ("n_time_steps", "block_num", "trial_num"):
            assert node.attrs[attribute].dtype == np.int64
        if path.name == "data_test.hdf5":
            assert set(node) == {"input_features"}
            assert set(node.attrs) == {"n_time_steps", "session", "block_num", "trial_num"}
            continue
        assert set(node) == {"input_features", "seq_class_ids", "transcription"}
        assert set(node.attrs) == {"n_time_steps", "session", "block_num", "trial_num", "seq_len", "sentence_label"}
        labels, characters = node["seq_class_ids"][()], node["transcription"][()]
        assert labels.dtype == characters.dtype == np.int32
        assert labels.shape == characters.shape == (500,)
        text = node.attrs["sentence_label"]
        assert isinstance(text, str)
        assert "".join(chr(code) for code in characters if code) == text
        length = node.attrs["seq_len"]
        assert tuple(labels[:length]) == lexicon.labels(text, name)
        assert labels[length - 1] == SILENCE
        assert not labels[length:].any()


def test_synthesize_trials_are_numbered_without_gaps(simulation):
    for path in simulation.glob("*/*.hdf5"):
        with h5py.File(path, "r") as file:
            assert list(file) == [f"trial_{number:04d}" for number in range(len(file))]
            assert file.attrs["simulated"]


def test_synthesize_held_out_sentences_are_not_in_train(tmp_path):
    synthesize(tmp_path / "out", replace(TINY, trials=60, held_out_share=0.5))
    said = {}
    for path, _, node in all_trials(tmp_path / "out"):
        if "test" not in path.name:
            said.setdefault(path.name, []).append(node.attrs["sentence_label"])
    assert len(said["data_train.hdf5"]) == len(set(said["data_train.hdf5"])) == 60
    assert len(said["data_val.hdf5"]) == 30
    assert not set(said["data_train.hdf5"]) & set(said["data_val.hdf5"])


def test_synthesize_features_are_z_scored_by_block(simulation):
    blocks = {}
    for path, _, node in all_trials(simulation):
        blocks.setdefault((path.parent.name, int(node.attrs["block_num"])), []).append(node["input_features"][()])
    assert len(blocks) == 4
    for trials in blocks.values():
        everything = np.concatenate(trials)
        np.testing.assert_allclose(everything.mean(axis=0), 0, atol=1e-4)
        np.testing.assert_allclose(everything.std(axis=0), 1, atol=1e-3)


def test_synthesize_a_block_and_number_name_one_trial(simulation):
    places = [
        (p.parent.name, int(n.attrs["block_num"]), int(n.attrs["trial_num"])) for p, _, n in all_trials(simulation)
    ]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("gzip", [False, True])
def test_synthesize_same_settings_give_the_same_bytes(tmp_path, gzip):
    settings = replace(TINY, gzip=gzip)
    for name in ("a", "b"):
        synthesize(tmp_path / name, settings)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    synthesize(tmp_path / "c", replace(settings, seed=1))
    assert not set(hashes(tmp_path / "a").values()) & set(hashes(tmp_path / "c").values())


def test_synthesize_gzip_changes_the_storage_alone(tmp_path):
    synthesize(tmp_path / "plain", TINY)
    synthesize(tmp_path / "small", replace(TINY, gzip=True))
    pairs = zip(all_trials(tmp_path / "plain"), all_trials(tmp_path / "small"), strict=True)
    for (_, _, plain), (_, _, small) in pairs:
        assert plain["input_features"].compression is None
        assert small["input_features"].compression == "gzip"
        np.testing.assert_array_equal(plain["input_features"][()], small["input_features"][()])


def test_synthesize_report_and_names(tmp_path):
    report = synthesize(
        tmp_path / "out", replace(TINY, sessions=3, train_only_sessions=1, trials=4, held_out_share=0.25)
    )
    assert report.trials == {"train": 12, "val": 2, "test": 2}
    days = [datetime.datetime.strptime(name, "t15.%Y.%m.%d") for name in report.sessions]
    assert days == sorted(set(days))
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*"))
    assert len(files) == 7
    assert [name for name in files if name.startswith(report.sessions[0])] == [f"{report.sessions[0]}/data_train.hdf5"]
    lengths = [node.attrs["n_time_steps"] for _, _, node in all_trials(tmp_path / "out")]
    assert report.mean_bins == pytest.approx(np.mean(lengths))
    assert report.longest_bins == max(lengths)
    note = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert note["complete"]
    assert note["settings"]["features"] == 8


def test_synthesize_into_a_used_folder_is_a_user_error(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "t15.2023.08.11").mkdir()
    with pytest.raises(UserError) as raised:
        synthesize(tmp_path / "out", replace(TINY, overwrite=True))
    assert "is no simulation" in raised.value.what
    assert raised.value.where == str(tmp_path / "out")
    assert raised.value.fix == "give another folder"


def test_synthesize_over_a_simulation_needs_overwrite(tmp_path):
    synthesize(tmp_path / "out", replace(TINY, sessions=2))
    with pytest.raises(UserError) as raised:
        synthesize(tmp_path / "out", TINY)
    assert raised.value.what == "there is a simulation here already"
    assert "--overwrite" in raised.value.fix
    report = synthesize(tmp_path / "out", replace(TINY, overwrite=True))
    assert [path.name for path in sorted((tmp_path / "out").glob("t15.*"))] == list(report.sessions)


def test_synthesize_interrupted_leaves_no_half_file_and_can_be_run_again(tmp_path):
    def stop(stage, done, total):
        if done == 1:
            raise KeyboardInterrupt

    settings = replace(TINY, sessions=2)
    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "out", settings, stop)
    assert not json.loads((tmp_path / "out" / "simulation.json").read_text())["complete"]
    synthesize(tmp_path / "out", settings)
    synthesize(tmp_path / "fresh", settings)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_synthesize_where_nothing_can_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError) as raised:
        synthesize(tmp_path / "file" / "out", TINY)
    assert "the trials cannot be written" in raised.value.what
    assert raised.value.where == str(tmp_path / "file" / "out")
    assert "another folder" in raised.value.fix


def test_synthesize_own_sentences_are_said(tmp_path):
    lines = ["Bring it closer.", "How are you?", "No more tea."]
    (tmp_path / "mine.txt").write_text("\n".join(lines))
    synthesize(tmp_path / "out", replace(TINY, held_out_share=0, sentences=str(tmp_path / "mine.txt")))
    assert sorted(node.attrs["sentence_label"] for _, _, node in all_trials(tmp_path / "out")) == lines


def test_synthesize_sentence_beyond_the_layout_is_a_user_error(tmp_path):
    (tmp_path / "mine.txt").write_text("go " * 250)
    with pytest.raises(UserError) as raised:
        synthesize(tmp_path / "out", replace(TINY, trials=1, held_out_share=0, sentences=str(tmp_path / "mine.txt")))
    assert "the layout holds 500" in raised.value.what
    assert raised.value.where == str(tmp_path / "mine.txt")
    assert raised.value.fix == "shorten it"


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"sessions": 0}, "sessions is 0, expected 1 to 1000", "--sessions"),
        ({"bins_per_phoneme": 1.0}, "bins_per_phoneme is 1.0, expected 2 to 1000", "--bins-per-phoneme"),
        ({"drift": 1.5}, "drift is 1.5, expected 0 to 1", "--drift"),
        ({"drift": float("nan")}, "drift is nan, expected 0 to 1", "--drift"),
        ({"features": 12}, "features is 12, expected a multiple of 8", "--features"),
        ({"features": 0}, "features is 0, expected a multiple of 8", "--features"),
    ],
)
def test_synth_settings_out_of_range_are_user_errors(changes, what, where):
    with pytest.raises(UserError) as raised:
        SynthSettings(**changes)
    assert raised.value.what.startswith(what)
    assert raised.value.where == where
    assert raised.value.fix.startswith("give")
