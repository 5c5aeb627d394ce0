"""What configuration, data and model must agree on, each with the finding that it gives."""

import dataclasses

import numpy as np
import pytest

from xla_b2t import config as configuration
from xla_b2t.audit.inventory import check
from xla_b2t.audit.resume import Resumed, changed_keys
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError

SMALL = ["model.options.hidden=8", "model.options.layers=1", "model.options.patch_bins=4", "train.batch_size=8"]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inventory")
    synthesize(folder / "trials", SynthSettings(sessions=2, trials=24, features=16, seed=5, bins_per_phoneme=3.0))
    prebatch(folder / "trials", folder / "groups", PrebatchSettings(num_buckets=2, patch_bins=4, patch_stride=2))
    return folder / "groups"


def load(groups, *keys):
    options = [*SMALL, "model.options.patch_stride=2", f"data.dir={groups}", *keys]
    return configuration.load(None, options)


def refusal(config, num_ranks=2, resumed=None):
    with pytest.raises(UserError) as caught:
        check(config, num_ranks, resumed)
    return caught.value


@pytest.fixture
def resumed(groups, tmp_path):
    (tmp_path / "config.toml").write_text(configuration.dumps(load(groups)))
    return Resumed(str(tmp_path / "config.toml"), open_group_set(groups).conversion, 16)


def test_check_of_run_that_agrees_is_silent(groups, capsys):
    check(load(groups), 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_check_refuses_variables_that_change_dtypes(groups, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    error = refusal(load(groups))
    assert name in error.what and error.fix == f"unset {name}"


def test_check_of_unlabelled_validation_split_names_it(groups):
    error = refusal(load(groups, "validation.split=test"))
    assert "test: found no labels, expected labels" in error.what
    assert error.where.endswith("test.h5") and "validation.every=0" in error.fix


def test_check_of_missing_split_lists_those_that_are_there(groups):
    error = refusal(load(groups, "validation.split=dev"))
    assert "dev: found train, val, test" in error.what


def test_check_with_more_ranks_than_groups_says_how_many_are_needed(groups):
    error = refusal(load(groups), num_ranks=9)
    assert "at least 9" in error.what and "fewer --cores" in error.fix


def test_check_of_stride_too_coarse_for_labels_counts_trials(groups):
    error = refusal(load(groups, "model.options.patch_stride=12"))
    assert "trials of train" in error.what and "steps for" in error.what
    assert "train.h5" in error.where and "--patch-bins and --patch-stride of the model (now 4 and 2)" in error.fix


def test_check_of_resume_names_every_changed_key(groups, resumed):
    check(load(groups, "train.steps=7", "run.cores=2", "validation.every=3", "optimizer.sharded=true"), 2, resumed)
    error = refusal(load(groups, "run.seed=4", "model.options.hidden=9", "optimizer.eps=0.2"), 2, resumed)
    assert "3 things must change" in error.what
    for text in ("run.seed: found 4", "model.options.hidden: found 9, expected 8", "optimizer.eps: found 0.2"):
        assert text in error.what
    assert "run.dir=" in error.fix


def test_check_of_resume_may_begin_elsewhere_and_turn_the_kernels_off(groups, resumed):
    check(load(groups, "train.init_from=moved", "model.options.kernel=false"), 2, resumed)


def test_check_of_resume_takes_an_option_that_is_named_for_the_default_that_it_was(groups, resumed):
    check(load(groups, "model.options.dropout=0.4"), 2, resumed)
    error = refusal(load(groups, "model.options.dropout=0.3"), 2, resumed)
    assert "model.options.dropout: found 0.3, expected 0.4, with which this run began" in error.what


def test_check_of_resume_of_a_users_own_model_keeps_an_option_named_kernel(groups, tmp_path):
    keys = ["model.factory=my_model.py:build", "model.options.kernel=3"]
    (tmp_path / "config.toml").write_text(configuration.dumps(load(groups, *keys)))
    keys[1] = "model.options.kernel=5"
    (found,) = changed_keys(str(tmp_path / "config.toml"), load(groups, *keys))
    assert (found.name, found.found) == ("model.options.kernel", "5")


def test_check_of_resume_with_another_global_batch_gives_both(groups, resumed):
    error = refusal(load(groups), 3, resumed)
    assert "trials an update: found 24, expected 16" in error.what
    assert "train.global_batch=16" in error.fix


def test_check_of_resume_with_other_groups_says_so(groups, resumed):
    error = refusal(load(groups), 2, dataclasses.replace(resumed, conversion="another"))
    assert "data.dir: found groups of the conversion" in error.what
    assert "expected another, with which this run began" in error.what
    assert "--set data.dir=" in error.fix


def test_check_reads_no_features(groups, monkeypatch):
    monkeypatch.setattr(np, "frombuffer", None)
    check(load(groups), 2)
