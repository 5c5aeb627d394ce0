"""Weights are found, matched to sessions by name and to a model by shape, and a run begins with them."""

import dataclasses

import pytest
import torch

from xla_b2t import config as configuration
from xla_b2t.config import DataConfig, ModelConfig
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.selection import open_selected
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes
from xla_b2t.training import nejm
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder, load_file
from xla_b2t.training.loop import Job, run_rank
from xla_b2t.training.step import initial_state
from xla_b2t.training.weights import (
    check_fits,
    check_use,
    find_checkpoint,
    for_sessions,
    read_checkpoint,
    start_from,
    weights_file,
)
from xla_b2t.xla.world import Alone

SESSIONS = ("mon", "tue", "wed")
OPTIONS = {"hidden": 6, "layers": 1, "patch_bins": 4, "patch_stride": 2}


def small(num_features=4, num_days=3, num_classes=41, seed=2, **changes):
    model = build_model(ModelConfig(options=OPTIONS | changes), Sizes(num_features, num_days, num_classes), seed=seed)
    with torch.no_grad():
        for day, weight_CC in enumerate(model.day.day_weight):
            weight_CC.mul_(day + 1)
            model.day.day_bias[day] = day + 1
    return model


def make(model=None, sessions=SESSIONS, num_features=4, keys=()):
    config = configuration.load(None, [f"model.options.{key}={value}" for key, value in OPTIONS.items()] + list(keys))
    state = initial_state(model or small())
    return Checkpoint(5, state, configuration.dumps(config), "abc", 32, sessions, num_features, 41, 0.5)


def test_find_checkpoint_knows_runs_and_published_folders(tmp_path):
    run = CheckpointFolder(tmp_path / "run").save(make(), is_best=True)
    theirs, _ = nejm.export(make(), tmp_path / "theirs", "run", overwrite=False)
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(tmp_path / "run", "latest") == run
    assert find_checkpoint(tmp_path / "theirs") == theirs
    assert find_checkpoint(tmp_path / "run", str(theirs)) == theirs


def test_find_checkpoint_of_a_run_that_holds_an_export_is_the_runs(tmp_path):
    run = CheckpointFolder(tmp_path).save(make(), is_best=True)
    nejm.export(make(), tmp_path, "run", overwrite=False)
    assert find_checkpoint(tmp_path) == run


def test_find_checkpoint_where_there_is_none_says_what_to_give(tmp_path):
    with pytest.raises(UserError) as caught:
        find_checkpoint(tmp_path / "nowhere")
    assert caught.value.what == "there is no such run directory"
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "nowhere"), "give the directory that train wrote")
    with pytest.raises(UserError, match="no checkpoint yet"):
        find_checkpoint(tmp_path)
    nejm.export(make(), tmp_path, "run", overwrite=False)
    with pytest.raises(UserError) as caught:
        find_checkpoint(tmp_path, "latest")
    assert caught.value.what == "this is not a run directory: it holds a best checkpoint only"
    assert (caught.value.where, caught.value.fix) == (str(tmp_path), "leave latest away")


def test_read_checkpoint_takes_both_layouts_and_no_other(tmp_path):
    ours = CheckpointFolder(tmp_path / "run").save(make(), is_best=True)
    theirs, _ = nejm.export(make(), tmp_path / "theirs", "run", overwrite=False)
    for path in (ours, theirs):
        found = read_checkpoint(path)
        assert found.sessions == SESSIONS
        assert torch.equal(found.state.weights["day.day_bias"], make().state.weights["day.day_bias"])
    torch.save({"model": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(UserError) as caught:
        read_checkpoint(tmp_path / "other.pt")
    assert caught.value.what == "other.pt is not a checkpoint of xla_b2t"
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "other.pt"), "give a file of checkpoints/")


def test_for_sessions_picks_days_by_name():
    checkpoint = make()
    assert for_sessions(checkpoint, "a.pt", SESSIONS, "data") is checkpoint
    found = for_sessions(checkpoint, "a.pt", ("wed", "mon"), "data")
    assert found.sessions == ("wed", "mon")
    assert found.state.weights["day.day_bias"][:, 0].tolist() == [3, 1]
    assert found.state.weights["day.day_weight"][:, 0, 0].tolist() == [3, 1]
    assert (found.state.moment1, found.state.moment2) == ({}, {})
    for name in ("gru.bias_ih_l0", "out.weight", "h0"):
        assert found.state.weights[name] is checkpoint.state.weights[name]


def test_for_sessions_that_the_checkpoint_lacks_lists_them():
    wanted = ("mon", *(f"new {number}" for number in range(7)))
    with pytest.raises(UserError) as caught:
        for_sessions(make(), "a.pt", wanted, "groups")
    assert caught.value.what == (
        "7 of the 8 sessions are unknown to the checkpoint: new 0, new 1, new 2, new 3, new 4 and 2 more; "
        "it was trained on 3, mon to wed"
    )
    assert caught.value.where == "groups"
    assert caught.value.fix == "give groups that were pre-batched from its sessions alone"


def test_for_sessions_of_a_users_own_model_must_be_those_of_the_run():
    checkpoint = make(keys=["model.factory=my_model.py:build"])
    assert for_sessions(checkpoint, "a.pt", SESSIONS, "groups") is checkpoint
    with pytest.raises(UserError) as caught:
        for_sessions(checkpoint, "a.pt", ("tue", "mon", "wed"), "groups")
    assert "which weights of my_model.py:build belong to a session is not known" in caught.value.what
    assert (caught.value.where, caught.value.fix) == ("groups", "give the groups that the run trained on")


def test_for_sessions_with_a_broken_configuration_blames_the_checkpoint():
    checkpoint = dataclasses.replace(make(), config="[model")
    with pytest.raises(UserError) as caught:
        for_sessions(checkpoint, "a.pt", ("tue", "mon"), "groups")
    assert caught.value.what.startswith("the configuration kept here is not TOML: ")
    assert (caught.value.where, caught.value.fix) == ("a.pt", "use another file")


def test_check_fits_says_what_is_missing_unknown_or_of_another_shape():
    checkpoint = make()
    check_fits(small(), checkpoint, "a.pt")
    weights = dict(checkpoint.state.weights)
    weights["extra"] = weights.pop("h0")
    weights["out.bias"] = torch.zeros(7)
    broken = dataclasses.replace(checkpoint, state=dataclasses.replace(checkpoint.state, weights=weights))
    with pytest.raises(UserError) as caught:
        check_fits(small(), broken, "a.pt")
    assert caught.value.what == (
        "the weights do not fit the model: h0 is missing, extra is unknown, out.bias is (7,), expected (41,)"
    )
    assert caught.value.where == "a.pt"
    assert "set [model.options] to those it was trained with" in caught.value.fix


def test_check_use_of_data_with_other_features_is_refused(small_groups):
    with pytest.raises(UserError) as caught:
        check_use(make(), "a.pt", ModelConfig(options=OPTIONS), open_group_set(small_groups))
    assert caught.value.what == "the groups have 16 features, the checkpoint was trained on 4"
    assert (caught.value.where, caught.value.fix) == (
        str(small_groups), "give groups with the features that it was trained on"
    )  # fmt: skip


def test_check_use_of_weights_of_other_columns_is_refused_though_there_are_as_many(small_groups):
    checkpoint = make(small(num_days=2), open_group_set(small_groups).sessions, keys=['data.features=["0-3"]'])
    config = ModelConfig(options=OPTIONS)
    check_use(checkpoint, "a.pt", config, open_selected(DataConfig(dir=str(small_groups), features=("0-1", "2-3"))))
    with pytest.raises(UserError) as caught:
        check_use(checkpoint, "a.pt", config, open_selected(DataConfig(dir=str(small_groups), features=("4-7",))))
    assert caught.value.what.startswith("the checkpoint was trained on 0-3 features, and other columns are read")
    assert (caught.value.where, caught.value.fix) == ("a.pt: data.features", 'set data.features=["0-3"]')


def test_check_use_of_a_checkpoint_of_another_model_says_which_it_is_of(small_groups):
    group_set = open_group_set(small_groups)
    checkpoint = make(small(num_features=16, num_days=2), group_set.sessions, num_features=16)
    check_use(checkpoint, "a.pt", ModelConfig(options=OPTIONS), group_set)
    with pytest.raises(UserError) as caught:
        check_use(checkpoint, "a.pt", ModelConfig(name="noise_split"), group_set)
    assert (
        caught.value.what
        == "the weights are of another model: model.name=gru_decoder, and this is model.name=noise_split"
    )
    assert caught.value.where == "a.pt"
    assert caught.value.fix == "give the checkpoint of a model like this one, or --set model.name=gru_decoder"
    with pytest.raises(UserError, match="the weights do not fit the model: h0 is"):
        check_use(checkpoint, "a.pt", ModelConfig(options={**OPTIONS, "hidden": 7}), group_set)


def test_check_use_of_a_users_model_that_holds_ours_takes_the_weights_of_ours(small_groups, tmp_path):
    path = tmp_path / "ours.py"
    path.write_text(
        "from xla_b2t.config import ModelConfig\n"
        "from xla_b2t.models.build import build_model\n"
        "def build(sizes, options):\n"
        "    return build_model(ModelConfig(options=options), sizes)\n"
    )
    group_set = open_group_set(small_groups)
    checkpoint = make(small(num_features=16, num_days=2), group_set.sessions, num_features=16)
    check_use(checkpoint, "a.pt", ModelConfig(factory=f"{path}:build", options=OPTIONS), group_set)
    with pytest.raises(UserError) as caught:
        check_use(checkpoint, "a.pt", ModelConfig(factory=f"{path}:build", options={**OPTIONS, "layers": 2}), group_set)
    assert f"model.name=gru_decoder, and this is model.factory={path}:build" in caught.value.what


def test_weights_file_of_a_file_is_itself_and_of_a_folder_its_best(tmp_path):
    best = CheckpointFolder(tmp_path / "run").save(make(), is_best=True)
    assert weights_file(str(tmp_path / "run")) == weights_file(str(best)) == best
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        weights_file(str(tmp_path / "empty"))
    assert caught.value.what == "there is no checkpoint in this folder"
    assert caught.value.where == f"train.init_from: {tmp_path}/empty"
    assert caught.value.fix.startswith("give a run that train wrote, a file of its checkpoints/, or a folder of ")


def test_start_from_replaces_every_value_with_days_by_name(tmp_path):
    path, _ = nejm.export(make(), tmp_path, "run", overwrite=False)
    model = small(num_days=2, seed=8)
    start_from(model, path, ("wed", "tue"), "data")
    expected = for_sessions(make(), "a.pt", ("wed", "tue"), "data").state.weights
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name
    with pytest.raises(UserError, match=r"do not fit the model: gru\.weight_ih_l1 is missing"):
        start_from(small(layers=2), path, SESSIONS, "data")


def test_run_begins_with_the_weights_it_is_given_and_a_fresh_optimizer(small_groups, tmp_path):
    sessions = open_group_set(small_groups).sessions
    source = make(small(num_features=16, num_days=3), ("t15.1999.01.01", sessions[1], sessions[0]), num_features=16)
    path, _ = nejm.export(source, tmp_path / "theirs", "run", overwrite=False)
    keys = [
        *(f"model.options.{key}={value}" for key, value in OPTIONS.items()),
        *(f"data.dir={small_groups}", f"run.dir={tmp_path}/run", f"train.init_from={path}", "model.dtype=float32"),
        *("train.steps=1", "train.global_batch=16", "train.log_every=1", "validation.every=0"),
    ]
    config = configuration.load(None, keys)
    job = Job(config, checkpoint="", allow_recompile=False, seconds={}, started=0.0, init_from=str(path))
    run_rank(Alone("cpu"), job)
    found = load_file(CheckpointFolder(tmp_path / "run").find("latest")[0])
    # The rate of the first update is 0, the beginning of the warm-up.
    expected = for_sessions(source, "a.pt", sessions, "data").state.weights
    assert found.sessions == sessions
    for name, weight in found.state.weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert found.step == 1
    assert any(moment.any() for moment in found.state.moment1.values())
