"""Weights on their way out and back in, through the command line."""

import json
import os

import pytest
import torch

from xla_b2t import cli, config
from xla_b2t.commands import train
from xla_b2t.errors import UserError
from xla_b2t.training.checkpoint import CheckpointFolder, load_file

KEYS = [
    *("model.options.hidden=8", "model.options.layers=1", "model.options.patch_bins=4", "model.options.patch_stride=2"),
    *("train.global_batch=16", "train.log_every=1", "validation.every=2", "train.steps=2"),
    "optimizer.rate={ peak = 1e-2, final = 1e-3, warmup_steps = 1, decay_steps = 10 }",
]


@pytest.fixture(scope="module")
def folder(small_groups, tmp_path_factory):
    """Groups, and a run of two updates on them."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "groups").symlink_to(small_groups)
    assert cli.main(["train", "--json", "--no-preflight", *options(folder, "run")]) == 0
    return folder


def options(folder, run, *keys):
    keys = [*KEYS, f"data.dir={folder}/groups", f"run.dir={folder}/{run}", *keys]
    return ["--cores", "1", "--config", os.devnull, *(word for key in keys for word in ("--set", key))]


def test_train_writes_every_option_of_the_model_into_its_configuration(folder):
    written = config.load(folder / "run/config.toml").model.options
    assert (written["hidden"], written["dropout"], written["kernel"]) == (8, 0.4, True)


def test_export_into_a_run_is_refused(folder, capsys):
    run = folder / "run"
    assert cli.main(["export", str(run), "--format", "nejm", "--out", str(run), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["what"], error["where"]) == ("this directory holds a run", f"--out {run}")
    assert error["fix"] == "give --out a folder of its own"
    assert not (run / "checkpoint").exists()


@pytest.mark.parametrize("size", ["0", "-5"])
def test_evaluate_with_no_trials_at_once_is_refused(folder, capsys, size):
    assert cli.main(["evaluate", str(folder / "run"), "--batch-size", size, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == f"{size} trials a core were asked for"
    assert (error["where"], error["fix"]) == ("--batch-size", "give 1 or more")


def weights(folder, run):
    return load_file(CheckpointFolder(folder / run).find("latest")[0]).state.weights


def test_export_then_evaluate_and_begin_from_it_keep_the_weights(folder, capsys):
    out = folder / "theirs"
    assert cli.main(["export", str(folder / "run"), "--format", "nejm", "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["format"]) == (2, "nejm")
    assert said["files"] == [str(out / "checkpoint/best_checkpoint"), str(out / "checkpoint/args.yaml")]

    results = []
    for run in (folder / "run", out):
        assert cli.main(["evaluate", str(run), "--data", str(folder / "groups"), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    for key in ("per", "errors", "phonemes", "per_by_day", "loss", "trials"):
        assert results[0][key] == results[1][key], key

    first = ["train.steps=1", "validation.every=0"]
    assert (
        cli.main(["train", "--json", "--no-preflight", *options(folder, "next", f"train.init_from={out}", *first)]) == 0
    )
    before, after = weights(folder, "run"), weights(folder, "next")
    assert all(torch.equal(before[name], after[name]) for name in before), "the rate of the first update is 0"

    # Going on with the run does not need what it began with.
    (out / "checkpoint/best_checkpoint").unlink()
    going_on = options(folder, "next", f"train.init_from={out}", "validation.every=0")
    assert cli.main(["train", "--json", "--no-preflight", "--resume", *going_on]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["resumed_from"] == 1


def test_export_prints_what_to_do_next(folder, capsys):
    run = str(folder / "run")
    assert cli.main(["export", run, "--format", "nejm", "--out", str(folder / "told"), "--checkpoint", "latest"]) == 0
    out = capsys.readouterr().out
    assert "nejm: step 2 of" in out
    assert "args.yaml" in out
    assert "evaluate_model.py --model_path" in " ".join(out.split())


def test_export_to_a_layout_that_is_not_known_names_those_that_are(folder, capsys):
    assert cli.main(["export", str(folder / "run"), "--format", "onnx", "--out", str(folder / "x")]) == 2
    assert "invalid choice: 'onnx' (choose from" in capsys.readouterr().err


def test_evaluate_of_a_published_folder_asks_for_the_data(folder, capsys):
    out = folder / "asks"
    assert cli.main(["export", str(folder / "run"), "--format", "nejm", "--out", str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", str(out), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "a checkpoint of the published baseline does not name any groups"
    assert error["where"] == str(out / "checkpoint/best_checkpoint")
    assert error["fix"] == "give the folder that prebatch wrote with --data"


def test_train_that_would_begin_with_what_it_removes_is_refused(folder):
    keys = [*KEYS, f"data.dir={folder}/groups", f"run.dir={folder}/run", f"train.init_from={folder}/run"]
    with pytest.raises(UserError) as caught:
        train._to_begin_with(config.load(None, keys), folder / "run")
    assert caught.value.what == "a run cannot begin with weights that lie in its own directory"
    assert caught.value.where == f"train.init_from: {folder}/run/checkpoints/step-00000002.pt"
    assert caught.value.fix == "give this run another directory: --set run.dir="


def test_train_that_begins_with_weights_of_another_model_is_refused_before_ranks_start(folder, capsys):
    arguments = options(folder, "other", f"train.init_from={folder}/run", "model.options.hidden=9")
    assert cli.main(["train", "--json", *arguments]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"].startswith("the weights do not fit the model: h0 is (1, 1, 8), expected (1, 1, 9)")
    assert not (folder / "other").exists()
