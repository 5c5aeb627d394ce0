"""The demo's data are made once, and again where they are of another version."""

import json

import pytest

from xla_b2t.commands import demo_data
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.prebatch import PrebatchSettings
from xla_b2t.data.synth import SynthSettings


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    synth = SynthSettings(sessions=1, trials=12, features=8, seed=1, bins_per_phoneme=3.0, overwrite=True)
    monkeypatch.setattr(demo_data, "SYNTH", synth)
    monkeypatch.setattr(demo_data, "PREBATCH", PrebatchSettings(num_buckets=1, patch_bins=4, overwrite=True))


def test_demo_data_are_made_once(tmp_path, capsys):
    for _ in range(2):
        demo_data.make_demo_data(tmp_path / "groups")
    assert capsys.readouterr().err.count("simulating a participant") == 1
    assert open_group_set(tmp_path / "groups").splits["train"].num_valid_G.sum() > 0


def test_demo_data_of_an_older_version_are_made_again(tmp_path):
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "train.h5").touch()
    (tmp_path / "groups" / "report.json").write_text(json.dumps({"format": "xla_b2t groups", "version": 1}))
    demo_data.make_demo_data(tmp_path / "groups")
    assert "train" in open_group_set(tmp_path / "groups").splits
    assert not (tmp_path / "groups" / "train.h5").exists()
