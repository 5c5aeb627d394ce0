import json

import h5py
import numpy as np
import pytest

from xla_b2t import cli


@pytest.fixture
def source(tmp_path):
    """Four trials, one of them with a class that does not exist, and a folder that is no session."""
    folder = tmp_path / "trials" / "t15.2023.08.11"
    folder.mkdir(parents=True)
    (tmp_path / "trials" / "figures").mkdir()
    with h5py.File(folder / "data_train.hdf5", "w") as file:
        for number, label in enumerate([3, 99, 5, 6]):
            node = file.create_group(f"trial_{number:04d}")
            node["input_features"] = np.zeros((40, 8), np.float32)
            node["seq_class_ids"] = np.array([label, 40, 0])
            node.attrs["n_time_steps"] = 40
            node.attrs["seq_len"] = 2
    return tmp_path / "trials"


def test_prebatch_prints_kept_refused_and_passed_over(source, tmp_path, capsys):
    assert cli.main(["prebatch", str(source), str(tmp_path / "groups"), "--group-size", "2"]) == 0
    out, err = capsys.readouterr()
    assert "class_out_of_range" in out
    assert "t15.2023.08.11/train/trial_0001" in out.replace("\n", "")
    assert "passed over in the source: figures" in out
    assert "check: 1 of 1" in err
    assert "write: 3 of 3, 0.0 MB" in err


def test_prebatch_json_is_one_object(source, tmp_path, capsys):
    assert cli.main(["prebatch", str(source), str(tmp_path / "groups"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["refused_by_reason"] == {"class_out_of_range": 1}
    assert report["splits"]["train"]["trials_kept"] == 3
    assert report["buckets"] == [{"input_bins": 48, "label_slots": 8}]


def test_prebatch_strict_exits_2_and_names_the_trial(source, tmp_path, capsys):
    assert cli.main(["prebatch", str(source), str(tmp_path / "groups"), "--strict"]) == 2
    assert "t15.2023.08.11/train/trial_0001: class_out_of_range, seq_class_ids[0] is 99" in capsys.readouterr().err
    assert not (tmp_path / "groups").exists()


def test_prebatch_defaults_are_those_of_the_settings(tmp_path):
    from dataclasses import fields

    from xla_b2t.data.prebatch import PrebatchSettings

    args = cli.parse(["prebatch", str(tmp_path), str(tmp_path)])
    for field in fields(PrebatchSettings):
        assert getattr(args, field.name.removeprefix("num_")) == field.default
