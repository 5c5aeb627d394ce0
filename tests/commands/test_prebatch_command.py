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


def test_prebatch_verify_says_what_was_looked_at(source, tmp_path, capsys):
    groups = str(tmp_path / "groups")
    assert cli.main(["prebatch", str(source), groups]) == 0
    capsys.readouterr()
    assert cli.main(["prebatch", "--verify", groups]) == 0
    assert capsys.readouterr().out.startswith(f"{groups}: all is well; 1 groups in 1 files, ")


def test_prebatch_verify_of_damaged_groups_exits_2_with_every_finding(source, tmp_path, capsys):
    groups = tmp_path / "groups"
    assert cli.main(["prebatch", str(source), str(groups)]) == 0
    (groups / "train-0000.h5").write_bytes(b"")
    (groups / "train-0001.h5.partial").write_bytes(b"")
    capsys.readouterr()
    assert cli.main(["prebatch", "--verify", str(groups), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert sorted(fault["where"] for fault in found["faults"]) == [
        str(groups / "train-0000.h5"),
        str(groups / "train-0001.h5.partial"),
    ]
    assert cli.main(["prebatch", "--verify", str(groups)]) == 2
    out = capsys.readouterr().out
    assert "the file has 0 bytes" in out and "2 faults" in out and "fix:   wait for it" in out


@pytest.mark.parametrize(
    ("arguments", "what", "where"),
    [
        (["--verify", "groups", "trials"], "a folder to verify and one to convert are both given", "--verify groups"),
        (["trials"], "there is no folder to write to", "prebatch"),
        (["trials", "groups", "--workers", "-1"], "--workers is -1, expected at least 0", "--workers"),
    ],
)
def test_prebatch_arguments_that_do_not_go_together_are_user_errors(arguments, what, where, capsys):
    assert cli.main(["prebatch", *arguments]) == 2
    err = capsys.readouterr().err
    assert what in err and f"where: {where}" in err and "fix:   give" in err


def test_prebatch_again_says_that_it_is_up_to_date(source, tmp_path, capsys):
    for _ in range(2):
        assert cli.main(["prebatch", str(source), str(tmp_path / "groups")]) == 0
    assert "up to date: nothing has changed, nothing was written" in capsys.readouterr().out


def test_prebatch_of_names_that_look_like_markup_prints_them(source, tmp_path, capsys):
    with h5py.File(source / "t15.2023.08.11" / "data_train.hdf5", "a") as file:
        file.create_group("[red]")
    assert cli.main(["prebatch", str(source), str(tmp_path / "groups")]) == 0
    assert "[red]" in capsys.readouterr().out.replace("\n", "")
