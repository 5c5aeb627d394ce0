import json

import pytest

from xla_b2t import cli

ARGS = ["--sessions", "1", "--trials", "4", "--features", "8", "--bins-per-phoneme", "4"]


def test_synth_prints_a_table_on_stdout_and_progress_on_stderr(tmp_path, capsys):
    assert cli.main(["synth", str(tmp_path / "out"), *ARGS]) == 0
    out, err = capsys.readouterr()
    assert "train 4, val 1, test 1" in out
    assert "simulate: 1 of 1" in err


def test_synth_json_is_one_object(tmp_path, capsys):
    assert cli.main(["synth", str(tmp_path / "out"), *ARGS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trials"] == {"train": 4, "val": 1, "test": 1}
    assert report["sessions"] == ["t15.2023.08.11"]
    assert report["seconds"] >= 0


def test_synth_defaults_are_those_of_the_settings(tmp_path):
    from dataclasses import fields

    from xla_b2t.data.synth import SynthSettings

    args = cli.parse(["synth", str(tmp_path)])
    assert {field.name: getattr(args, field.name) for field in fields(SynthSettings)} == {
        field.name: field.default for field in fields(SynthSettings)
    }


@pytest.mark.parametrize("flag", [["--features", "12"], ["--trials", "0"]])
def test_synth_impossible_setting_exits_2(tmp_path, capsys, flag):
    assert cli.main(["synth", str(tmp_path / "out"), *flag]) == 2
    assert flag[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
