"""The published baseline's folder: one that its code has saved is read, one that we write is as its code reads it."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from xla_b2t import config as configuration
from xla_b2t.config import ModelConfig
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes
from xla_b2t.training import nejm
from xla_b2t.training.checkpoint import Checkpoint
from xla_b2t.training.step import initial_state
from xla_b2t.training.weights import check_fits, read_checkpoint

RECORDED = Path(__file__).parent.parent / "models" / "data" / "nejm"
SESSIONS = ("t15.2023.08.11", "t15.2023.08.13")
SIZES = Sizes(num_features=4, num_days=2, num_classes=7)
KEYS = ["model.options.hidden=6", "model.options.layers=2", "model.options.patch_bins=3", "model.options.dropout=0.1"]


def make(*keys):
    """A checkpoint of ours, of a small decoder."""
    config = configuration.load(None, [*KEYS, *keys])
    state = initial_state(build_model(ModelConfig(options=config.model.options), SIZES, seed=1))
    return Checkpoint(9, state, configuration.dumps(config), "abc", 32, SESSIONS, 4, 7, 0.25)


def copied(folder, change=None):
    """The recorded folder, with its settings changed; the path of its checkpoint."""
    (folder / "checkpoint").mkdir()
    shutil.copy(RECORDED / "best_checkpoint", folder / "checkpoint")
    settings = yaml.safe_load((RECORDED / "args.yaml").read_text())
    if change:
        change(settings)
    (folder / "checkpoint" / "args.yaml").write_text(yaml.safe_dump(settings))
    return folder / "checkpoint" / "best_checkpoint"


def test_nejm_checkpoint_that_its_code_saved_is_read(tmp_path):
    checkpoint = read_checkpoint(copied(tmp_path))
    assert checkpoint.sessions == ("t15.2023.08.13", "t15.2023.08.11", "t15.2024.02.25")
    assert (checkpoint.num_features, checkpoint.num_classes, checkpoint.global_batch) == (4, 7, 64)
    assert (checkpoint.step, checkpoint.val_per) == (2, 0.125)
    config = configuration.loads(checkpoint.config, "here")
    assert config.augment.smooth_sigma_bins == 2.0
    assert config.model.options == {
        "patch_bins": 3, "patch_stride": 2, "hidden": 5, "layers": 2, "dropout": 0.4, "input_dropout": 0.2,
        "kernel": True,
    }  # fmt: skip
    with torch.device("meta"):
        check_fits(build_model(config.model, Sizes(4, 3, 7)), checkpoint, "here")


def test_nejm_settings_without_patches_and_smoothing_are_understood(tmp_path):
    def change(settings):
        settings["model"]["patch_size"] = settings["model"]["patch_stride"] = 0
        settings["dataset"]["data_transforms"]["smooth_data"] = False
        settings["model"]["rnn_dropout"] = "1e-1"  # what YAML makes of a bare 1e-1

    config = configuration.loads(read_checkpoint(copied(tmp_path, change)).config, "here")
    assert (config.model.options["patch_bins"], config.model.options["patch_stride"]) == (1, 1)
    assert config.model.options["dropout"] == 0.1
    assert config.augment.smooth_sigma_bins == 0


FIX = "put the args.yaml of its training beside the checkpoint: it names the sessions and the patch"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "its settings cannot be read: No such file or directory"),
        ("a: [", "its settings are not YAML: while parsing a flow node"),
        ("model: 3", "its settings do not describe the model: Expected `object`, got `int` - at `$.model`"),
        ("dataset: {}", "its settings do not describe the model: Object missing required field `sessions`"),
        ("dataset: {sessions: []}", "its settings do not describe the model: Expected `array` of length >= 1"),
    ],
)
def test_nejm_settings_that_do_not_serve_are_refused(tmp_path, text, what):
    path = copied(tmp_path)
    args = path.with_name("args.yaml")
    args.unlink() if text is None else args.write_text(text)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert caught.value.what.startswith(what)
    assert (caught.value.where, caught.value.fix) == (str(args), FIX)


def test_nejm_settings_that_name_a_session_twice_are_refused(tmp_path):
    def change(settings):
        settings["dataset"]["sessions"] = ["t15.2023.08.13", "t15.2023.08.11", "t15.2023.08.13"]

    path = copied(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert caught.value.what == (
        "its settings name a session more than once: t15.2023.08.13; which day layer is its own is not known"
    )
    assert caught.value.where == str(path.with_name("args.yaml"))
    assert caught.value.fix == "give each day layer a name of its own in dataset.sessions"


@pytest.mark.parametrize(
    "change",
    [
        {"scheduler_state_dict": [3]},
        {"scheduler_state_dict": {"last_epoch": "x"}},
        {"scheduler_state_dict": {"last_epoch": float("inf")}},
        {"val_PER": "low"},
        {"val_PER": torch.ones(2)},
    ],
)
def test_nejm_checkpoint_whose_numbers_are_none_is_refused(tmp_path, change):
    path = copied(tmp_path)
    torch.save({"model_state_dict": torch.load(path, weights_only=False)["model_state_dict"], **change}, path)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert caught.value.what.startswith("its scheduler_state_dict or val_PER is not as its training saves it: ")
    assert caught.value.where == str(path)
    assert caught.value.fix == "give a checkpoint of the published baseline, or leave both away"


def test_nejm_export_has_the_names_and_settings_that_its_evaluation_reads(tmp_path):
    files = nejm.export(make(), tmp_path / "out", "run", overwrite=False)
    assert files == [tmp_path / "out/checkpoint/best_checkpoint", tmp_path / "out/checkpoint/args.yaml"]
    recorded = torch.load(RECORDED / "best_checkpoint", weights_only=False)["model_state_dict"]
    values = torch.load(files[0], weights_only=True)
    found = values["model_state_dict"]
    assert found.keys() == {name for name in recorded if not name.endswith("s.2")}, "of two days, where there are three"
    assert {name: tensor.dim() for name, tensor in found.items()} == {name: recorded[name].dim() for name in found}
    assert values["val_PER"] == 0.25
    assert yaml.safe_load(files[1].read_text()) == {
        "model": {
            "n_input_features": 4, "n_units": 6, "n_layers": 2, "patch_size": 3, "patch_stride": 4, "rnn_dropout": 0.1,
            "input_network": {"input_layer_dropout": 0.2},
        },
        "dataset": {
            "sessions": list(SESSIONS), "n_classes": 7, "batch_size": 32,
            "data_transforms": {"smooth_data": True, "smooth_kernel_std": 2.0, "smooth_kernel_size": 100},
        },
        "use_amp": True,
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir()) == ["args.yaml", "best_checkpoint"]


def test_nejm_export_read_again_is_the_same_decoder(tmp_path):
    before = make("augment.smooth_sigma_bins=1.5")
    path, _ = nejm.export(before, tmp_path, "run", overwrite=False)
    after = read_checkpoint(path)
    for field in ("sessions", "num_features", "num_classes", "val_per", "global_batch"):
        assert getattr(after, field) == getattr(before, field)
    assert after.state.weights.keys() == before.state.weights.keys()
    for name, weight in before.state.weights.items():
        assert torch.equal(after.state.weights[name], weight), name
    config = configuration.loads(after.config, "here")
    assert config.augment.smooth_sigma_bins == 1.5
    assert config.model.options["dropout"] == 0.1


def test_nejm_export_without_smoothing_gives_a_kernel_of_one_tap(tmp_path):
    _, args = nejm.export(make("augment.smooth_sigma_bins=0"), tmp_path, "run", overwrite=False)
    transforms = yaml.safe_load(args.read_text())["dataset"]["data_transforms"]
    assert transforms == {"smooth_data": False, "smooth_kernel_std": 0.1, "smooth_kernel_size": 100}


@pytest.mark.parametrize("key", ["model.factory=my_model.py:build", "model.name=another"])
def test_nejm_export_of_another_model_is_refused(tmp_path, key):
    with pytest.raises(UserError) as caught:
        nejm.export(make(key), tmp_path / "out", "runs/first/step-9.pt", overwrite=False)
    name = key.partition("=")[2]
    assert caught.value.what == f"the run's model is {name}, the layout nejm holds nothing but gru_decoder"
    assert caught.value.where == "runs/first/step-9.pt"
    assert caught.value.fix == "export a run whose model.name is gru_decoder"
    assert not (tmp_path / "out").exists()


def test_nejm_export_over_a_checkpoint_asks_first(tmp_path):
    path, _ = nejm.export(make(), tmp_path, "run", overwrite=False)
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        nejm.export(make(), tmp_path, "run", overwrite=False)
    assert (caught.value.what, caught.value.where) == ("there is a checkpoint already", str(path))
    assert caught.value.fix == "give another --out, or --overwrite to replace what is there"
    assert path.read_bytes() == before
    nejm.export(dataclasses.replace(make(), val_per=None), tmp_path, "run", overwrite=True)
    assert read_checkpoint(path).val_per is None


def test_nejm_export_over_a_training_that_has_no_checkpoint_yet_keeps_its_settings(tmp_path):
    args = copied(tmp_path).with_name("args.yaml")
    args.with_name("best_checkpoint").unlink()
    before = args.read_bytes()
    with pytest.raises(UserError) as caught:
        nejm.export(make(), tmp_path, "run", overwrite=False)
    assert (caught.value.what, caught.value.where) == ("there are settings of a model already", str(args))
    assert caught.value.fix == "give another --out, or --overwrite to replace what is there"
    assert args.read_bytes() == before
    assert [path.name for path in args.parent.iterdir()] == ["args.yaml"]


@pytest.mark.parametrize("failing", ["args.yaml", "best_checkpoint"])
def test_nejm_export_that_ends_half_way_leaves_no_weights_beside_settings_of_another_order(
    tmp_path, monkeypatch, failing
):
    path, args = nejm.export(make(), tmp_path, "run", overwrite=False)
    replace = os.replace

    def fail(source, target):
        if Path(target).name == failing:
            raise OSError(5, "Input/output error")
        replace(source, target)

    other = dataclasses.replace(make(), sessions=SESSIONS[::-1])
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UserError, match="Input/output error"):
        nejm.export(other, tmp_path, "run", overwrite=True)
    monkeypatch.undo()
    assert [file.name for file in args.parent.iterdir()] == ["args.yaml"]
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert caught.value.what == "best_checkpoint cannot be read: No such file or directory"
    assert (caught.value.where, caught.value.fix) == (str(path), "check the path")
    nejm.export(other, tmp_path, "run", overwrite=True)
    assert read_checkpoint(path).sessions == SESSIONS[::-1]


def test_nejm_export_that_the_disk_does_not_take_says_why_and_keeps_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        nejm.export(make(), tmp_path / "file", "run", overwrite=False)
    assert caught.value.what == "the checkpoint cannot be written: Not a directory"
    assert (caught.value.where, caught.value.fix) == (str(tmp_path / "file"), "give another --out")

    path, args = nejm.export(make(), tmp_path / "out", "run", overwrite=False)
    before = path.read_bytes(), args.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        nejm.export(make("augment.smooth_sigma_bins=1"), tmp_path / "out", "run", overwrite=True)
    assert (path.read_bytes(), args.read_bytes()) == before
    assert sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir()) == ["args.yaml", "best_checkpoint"]
