"""What `evaluate` refuses before a rank is started; whole evaluations are in tests/training/test_run.py."""

import h5py
import pytest

from xla_b2t.commands.evaluate import _check_data
from xla_b2t.config import DataConfig
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError


def test_evaluate_of_a_split_of_which_the_run_selected_nothing_says_how_to_decode_it_all(tmp_path):
    synthesize(tmp_path / "trials", SynthSettings(sessions=1, trials=16, features=8, seed=3, bins_per_phoneme=3.0))
    for path in (tmp_path / "trials").glob("*/data_*.hdf5"):
        with h5py.File(path, "a") as file:
            for trial in file.values():
                trial.attrs["block_num"] = 1 if "train" in path.name else 2
    prebatch(tmp_path / "trials", tmp_path / "groups", PrebatchSettings(num_buckets=1, patch_bins=4, patch_stride=2))
    groups = str(tmp_path / "groups")
    with pytest.raises(UserError) as caught:
        _check_data(DataConfig(dir=groups, blocks=(1,)), "val", None, tmp_path / "a.pt")
    assert caught.value.what == "no trial of val is of the sessions and blocks that the run was given"
    assert caught.value.where == groups
    assert caught.value.fix == f"use another --split, or decode all of it with --data {groups}"
