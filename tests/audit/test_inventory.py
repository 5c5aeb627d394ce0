"""What configuration, data and model must agree on, each with the finding that it gives."""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from xla_b2t import config as configuration
from xla_b2t.audit.findings import Finding, finding_of, refuse
from xla_b2t.audit.inventory import check, numbers
from xla_b2t.audit.resume import Resumed, changed_keys
from xla_b2t.commands.run_options import given_in
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder
from xla_b2t.training.step import initial_state

PREBATCH_AGAIN = "run xla_b2t prebatch again"

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
    assert error.where.endswith("index.h5:/test") and "validation.every=0" in error.fix


def test_check_of_a_selection_is_of_what_is_selected(groups):
    sessions = open_group_set(groups).sessions
    keys = ["data.num_features=8", 'data.features=["0-7"]', f'data.sessions=["{sessions[1]}"]', "data.folds=2"]
    check(load(groups, *keys), 1)
    error = refusal(load(groups, "data.num_features=16", *keys[1:]))
    assert "data.num_features: found 16, expected 8" in error.what


def test_check_of_an_unknown_session_blames_the_override_that_named_it(groups):
    override = 'data.sessions=["t15.2023.08.1"]'
    (finding,) = numbers(load(groups, override), 1, given=given_in("run.toml", [override]))
    assert "there is no session 't15.2023.08.1'" in finding.found
    assert finding.where == f"--set {override}" and finding.fix == "did you mean t15.2023.08.11?"


def test_check_of_a_validation_split_of_which_nothing_is_selected_says_so(groups, tmp_path):
    folder = tmp_path / "trials"
    shutil.copytree(groups.parent / "trials", folder)
    for path in folder.glob("*/data_*.hdf5"):
        with h5py.File(path, "a") as file:
            for trial in file.values():
                trial.attrs["block_num"] = 1 if "train" in path.name else 2
    prebatch(folder, tmp_path / "groups", PrebatchSettings(num_buckets=2, patch_bins=4, patch_stride=2))
    check(load(tmp_path / "groups", "data.blocks=[1]", "validation.every=0"), 1)
    error = refusal(load(tmp_path / "groups", "data.blocks=[1]"))
    assert "val: found no trial, expected at least one that is asked for" in error.what
    assert error.where == "configuration: data.blocks"
    assert error.fix == "give more data.sessions or data.blocks, or set validation.every=0"


def test_check_of_missing_split_lists_those_that_are_there(groups):
    error = refusal(load(groups, "validation.split=dev"))
    assert "dev: found no such split in " in error.what and "expected one of train, val, test" in error.what
    assert error.where == "configuration: validation.split"


def test_check_with_more_ranks_than_groups_says_how_many_are_needed(groups):
    error = refusal(load(groups), num_ranks=9)
    assert "at least 9" in error.what and "fewer --cores" in error.fix


def test_check_of_stride_too_coarse_for_labels_counts_trials(groups):
    error = refusal(load(groups, "model.options.patch_stride=12"))
    assert "trials of train" in error.what and "steps for" in error.what
    assert (
        "index.h5:/train" in error.where and "--patch-bins and --patch-stride of the model (now 4 and 2)" in error.fix
    )


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


@pytest.fixture
def copied(groups, tmp_path):
    """A copy of the groups to damage."""
    return Path(shutil.copytree(groups, tmp_path / "groups"))


def change_manifest(folder, **changes):
    path = folder / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_file(folder, change, split="train"):
    """Changes an HDF5 file, and lets the manifest agree on its size."""
    path = folder / f"{split}-0000.h5"
    with h5py.File(path, "a") as file:
        change(file)
    manifest = json.loads((folder / "report.json").read_text())
    manifest["splits"][split]["files"][0]["bytes"] = path.stat().st_size
    change_manifest(folder, splits=manifest["splits"])


def change_index(folder, change):
    """Changes the index of `train`, and lets the manifest agree on its size and checksum."""
    path = folder / "index.h5"
    with h5py.File(path, "a") as file:
        change(file["train"])
    content = path.read_bytes()
    change_manifest(folder, index={"file": path.name, "bytes": len(content), "checksum": zlib.crc32(content)})


def test_numbers_of_a_run_that_agrees_are_no_finding(groups):
    assert numbers(load(groups, "data.num_features=16"), 2) == []


def test_numbers_without_a_group_folder_are_that_and_what_needs_no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    found = numbers(load(tmp_path / "none", "model.options.hiden=3", "train.batch_size=12"), 2)
    assert [finding.kind for finding in found] == ["environment", "groups", "model"]
    assert found[1] == Finding(
        "groups",
        "groups",
        str(tmp_path / "none"),
        "there is no such folder",
        "",
        "run xla_b2t prebatch, or correct data.dir",
    )
    assert (found[2].found, found[2].fix) == (
        "unknown key model.options.hiden", "did you mean model.options.hidden?"
    )  # fmt: skip


def test_numbers_without_a_group_folder_still_tell_which_keys_a_resumed_run_changes(tmp_path, resumed, groups):
    config = load(groups, "run.seed=4", f"data.dir={tmp_path}/none")
    assert [finding.name for finding in numbers(config, 2, resumed)] == ["groups", "run.seed"]
    config = load(groups, "model.options.hiden=4", f"data.dir={tmp_path}/none")
    assert [finding.name for finding in numbers(config, 2, resumed)] == ["groups", "model"]


def test_numbers_with_another_feature_count_are_one_finding_with_both(groups):
    assert numbers(load(groups, "data.num_features=512"), 2) == [
        Finding(
            "features",
            "data.num_features",
            "configuration: data.num_features",
            "512",
            f"16, as in {groups}",
            "set data.num_features=16, or give groups of 512 features with data.dir",
        )
    ]


def test_numbers_of_a_run_without_validation_do_not_look_at_its_labels(groups):
    keys = ["model.options.patch_stride=12", "validation.split=val"]
    names = [finding.name.partition(" of ")[2] for finding in numbers(load(groups, *keys), 2)]
    assert names == ["train", "val"]
    names = [finding.name.partition(" of ")[2] for finding in numbers(load(groups, *keys, "validation.every=0"), 2)]
    assert names == ["train"]


def test_numbers_with_a_batch_that_is_not_whole_groups_are_a_finding(groups):
    (found,) = numbers(load(groups, "train.batch_size=12"), 2)
    assert found.kind == "batch"
    assert found.found == "train.batch_size is 12, the data was pre-batched in groups of 8 trials"
    assert (found.where, found.expected) == ("configuration: train.batch_size", "")
    assert found.fix == "use a multiple of 8 or a number that divides it, or pre-batch again with --group-size"


def test_numbers_with_groups_of_another_layout_name_dtype_place_and_count(groups, copied):
    def change(file):
        for node in file["groups"].values():
            for name, dtype in (("features", np.float32), ("labels", np.int64), ("days", np.int64), ("valid", bool)):
                values = node[name][()].astype(dtype)
                del node[name]
                node[name] = values

    change_file(copied, change)
    found = numbers(load(copied), 2)
    total = len(open_group_set(copied).splits["train"].bucket_G)
    assert [(finding.kind, finding.name) for finding in found] == [
        ("input", "features of train"), ("labels", "labels of train"), ("days", "days of train"),
        ("groups", "valid of train"),
    ]  # fmt: skip
    assert found[0] == Finding(
        "input",
        "features of train",
        f"{copied}/train-0000.h5:/groups/0000/features",
        f"float32 in {total} of {total} groups",
        "uint16, the bits of bfloat16",
        PREBATCH_AGAIN,
    )


def test_numbers_with_a_label_beyond_the_classes_are_a_finding(copied):
    change_index(copied, lambda index: index["max_label"].write_direct(np.int32([3] * (len(index["pass"]) - 1) + [50])))
    (found,) = numbers(load(copied), 2)
    assert (found.kind, found.name, found.where) == (
        "classes",
        "labels of train",
        f"{copied}/index.h5:/train/max_label",
    )
    assert (found.found, found.expected) == ("class 50", "at most 40: there are 41 classes")
    assert found.fix == PREBATCH_AGAIN


def test_numbers_with_groups_of_other_classes_are_a_finding(copied):
    change_manifest(copied, num_classes=50)
    (found,) = numbers(load(copied), 2)
    assert (found.kind, found.name, found.where, found.found) == ("classes", "num_classes", str(copied), "50")
    assert found.expected == "41, the blank and the phonemes of xla_b2t/data/phonemes.py"


def test_numbers_with_a_session_twice_are_a_finding(copied):
    session = json.loads((copied / "report.json").read_text())["sessions"][0]
    change_manifest(copied, sessions=[session, session])
    (found,) = numbers(load(copied), 2)
    assert (found.kind, found.name, found.where) == ("days", "sessions", str(copied))
    assert (found.found, found.expected) == (f"{session} twice", "each session once: its place is its day")


def test_numbers_with_a_day_that_is_no_session_are_a_finding(copied):
    change_manifest(copied, sessions=["one"])
    (found,) = numbers(load(copied), 2)
    assert found.found == "the index is damaged: days goes from 0 to 1, expected 0 to 0"
    assert (found.kind, found.where, found.fix) == ("groups", f"{copied}/index.h5:/train/days", PREBATCH_AGAIN)


def test_numbers_with_a_trial_or_a_label_longer_than_its_bucket_give_the_first(copied):
    bucket = open_group_set(copied).buckets[open_group_set(copied).splits["train"].bucket_G[2]]

    def change(index):
        for table, value in (("input_bins", bucket.input_bins + 5), ("label_lengths", bucket.label_slots + 2)):
            values = index[table][()]
            values[2, :2] = value
            index[table][...] = values

    change_index(copied, change)
    assert numbers(load(copied), 2) == [
        Finding(
            kind,
            "2 trials of train",
            f"{copied}/index.h5:/train/{table}",
            f"{value} in group 2 trial 0",
            f"at most the {most} {unit} of its bucket",
            PREBATCH_AGAIN,
        )
        for kind, table, value, most, unit in (
            ("bucket", "input_bins", bucket.input_bins + 5, bucket.input_bins, "bins"),
            ("labels", "label_lengths", bucket.label_slots + 2, bucket.label_slots, "label slots"),
        )
    ]


def test_numbers_of_a_model_that_cannot_be_built_leave_out_what_needs_it(groups, tmp_path):
    (tmp_path / "broken.py").write_text("def build(sizes, options):\n    return 1 / 0\n")
    (found,) = numbers(load(groups, f"model.factory={tmp_path}/broken.py:build", "train.init_from=x"), 2)
    assert (found.kind, found.found) == ("model", "the factory failed: ZeroDivisionError: division by zero")
    assert (found.where, found.fix) == (f"{tmp_path}/broken.py:2", "correct the line")


@pytest.fixture
def begun(groups, tmp_path):
    """A checkpoint of a run on these groups; `begun(keys, columns)` changes its configuration and its state."""

    def save(*keys, **columns):
        config, group_set = load(groups, *keys), open_group_set(groups)
        sizes = sizes_of(group_set)
        state = dataclasses.replace(initial_state(build_model(config.model, sizes, seed=1)), **columns)
        checkpoint = Checkpoint(
            7, state, configuration.dumps(config), group_set.conversion, 16, group_set.sessions, 16, 41
        )
        path = CheckpointFolder(tmp_path / "begun").save(checkpoint, is_best=True)
        (tmp_path / "begun/config.toml").write_text(configuration.dumps(config))
        return Resumed(str(tmp_path / "begun/config.toml"), group_set.conversion, 16, str(path))

    return save


def test_numbers_of_a_run_that_goes_on_from_its_state_are_no_finding(groups, begun):
    assert numbers(load(groups), 2, begun()) == []


def test_numbers_of_a_run_that_goes_on_from_a_narrow_state_name_it(groups, begun):
    resumed = begun(moment1={"h0": torch.zeros(1, 1, 8, dtype=torch.bfloat16)})
    found = numbers(load(groups), 2, resumed)
    assert ("moment1 of h0", "bfloat16", "float32") in [(each.name, each.found, each.expected) for each in found]
    assert {(each.kind, each.where) for each in found} == {("resume", resumed.checkpoint)}


def test_numbers_of_a_run_that_goes_on_as_another_model_leave_its_parameters_out(groups, begun):
    (found,) = numbers(load(groups, "model.options.hidden=9"), 2, begun())
    assert (found.name, found.found) == ("model.options.hidden", "9")


def test_numbers_of_a_run_that_begins_with_weights_that_fit_are_no_finding(groups, begun):
    assert numbers(load(groups, f"train.init_from={begun().checkpoint}"), 2) == []


def test_numbers_of_a_run_that_begins_with_weights_of_another_model_say_so(groups, begun):
    path = begun().checkpoint
    (found,) = numbers(load(groups, f"train.init_from={path}", "model.options.layers=2"), 2)
    assert (found.kind, found.where) == ("weights", path)
    assert found.found.startswith("the weights do not fit the model: gru.weight_ih_l1 is missing")


def test_numbers_of_a_run_that_begins_with_weights_of_other_sessions_name_them(groups, begun, copied):
    change_manifest(copied, sessions=["one", "two"])
    (found,) = numbers(load(copied, f"train.init_from={begun().checkpoint}"), 2)
    assert found.kind == "weights"
    assert found.found.startswith("2 of the 2 sessions are unknown to the checkpoint: one, two; it was trained on 2")
    assert (found.where, found.fix) == (str(copied), "give groups that were pre-batched from its sessions alone")


def test_numbers_of_a_run_that_begins_with_no_file_say_so(groups, tmp_path):
    (found,) = numbers(load(groups, f"train.init_from={tmp_path}/no.pt"), 2)
    assert (found.kind, found.where) == ("weights", f"{tmp_path}/no.pt")


def test_numbers_broken_in_many_ways_tell_all_most_upstream_first(copied, monkeypatch):
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "true")

    def change(file):
        values = file["groups/0001/labels"][()].astype(np.int64)
        del file["groups/0001/labels"]
        file["groups/0001/labels"] = values

    change_file(copied, change)
    keys = ["data.num_features=512", "validation.split=dev", "model.options.patch_stride=12", "train.batch_size=0"]
    config = load(copied, *keys, "train.global_batch=20")
    found = numbers(config, 9)
    assert [finding.kind for finding in found] == ["environment", "labels", "split", "features", "labels", "batch"]
    error = refusal(config, 9)
    assert "6 things must change before this run can start:" in error.what
    blocks = str(error).split("\n(")
    assert len(blocks) == 7
    for number, (finding, block) in enumerate(zip(found, blocks[1:], strict=True), 1):
        assert block.startswith(f"{number}) ")
        assert f"\n    where: {finding.where}\n" in block
        assert f"\n    fix:   {finding.fix}" in block


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ([], "run.toml: model.options.hidden"),
        (["model.options.layers=2", "model.options.hiddens=2"], "run.toml: model.options.hidden"),
        (["model.options.hidden=3", "model.options.hidden=wide"], "--set model.options.hidden=wide"),
        (["model.options={hidden=1.5}", "run.seed=1"], "--set model.options={hidden=1.5}"),
    ],
)
def test_given_in_is_the_last_override_of_the_key_else_the_file(overrides, place):
    assert given_in("run.toml", overrides)("model.options.hidden") == place


def test_numbers_blame_the_override_or_the_file_that_gave_a_key(groups):
    def where(*keys):
        return [finding.where for finding in numbers(load(groups, *keys), 2, given=given_in("run.toml", keys))]

    assert where("model.options.hidden=wide") == ["--set model.options.hidden=wide"]
    assert where("model.name=noise-split") == ["--set model.name=noise-split"]
    assert where("train.batch_size=12") == ["--set train.batch_size=12"]
    assert where("data.num_features=5") == ["--set data.num_features=5"]
    (found,) = numbers(load(groups, "train.batch_size=12"), 2, given=given_in("run.toml", []))
    assert found.where == "run.toml: train.batch_size"


def test_refuse_of_an_error_that_was_made_a_finding_is_that_error():
    error = UserError("it is 3, and that is wrong", "a.toml", "write 4")
    with pytest.raises(UserError) as caught:
        refuse([finding_of(error, "batch")])
    assert str(caught.value) == str(error)
    assert finding_of(error, "batch").kind == "batch"
