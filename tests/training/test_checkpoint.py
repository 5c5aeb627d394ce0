"""Checkpoints are whole or passed over, and load without torch_xla."""

import dataclasses
import gc
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder, load_file
from xla_b2t.training.step import TrainState


def make(step, val_per=None):
    weights = {"w": torch.full((3, 2), float(step))}
    state = TrainState(weights, {"w": torch.zeros(3, 2)}, {"w": torch.ones(3, 2)}, {"b": torch.ones(2)})
    return Checkpoint(
        step, state, "[run]\nseed = 1\n", "abc", 64, ("day 1", "day 2"), 16, 41, val_per, {"val_per": val_per}
    )


def test_save_then_load_gives_the_same(tmp_path):
    path = CheckpointFolder(tmp_path).save(make(7, 0.5), is_best=True)
    found = load_file(path)
    expected = make(7, 0.5)
    for field in dataclasses.fields(Checkpoint):
        if field.name != "state":
            assert getattr(found, field.name) == getattr(expected, field.name)
    for part in ("weights", "moment1", "moment2", "fixed"):
        torch.testing.assert_close(getattr(found.state, part), getattr(expected.state, part), rtol=0, atol=0)


def test_save_many_keeps_two_latest_and_best(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4, 5):
        folder.save(make(step, 0.1 * step), is_best=step == 2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["manifest.json", "step-00000002.pt", "step-00000004.pt", "step-00000005.pt"]
    assert folder.find("latest")[0].name == "step-00000005.pt"
    assert folder.find("best")[0].name == "step-00000002.pt"
    assert folder.latest_step() == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_find_latest_that_is_damaged_falls_back_with_warning(tmp_path, caplog, damage):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1), is_best=False)
    path = folder.save(make(2), is_best=False)
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: len(content) // 2] if damage == "truncate" else content)
    with caplog.at_level(logging.WARNING):
        assert folder.find("latest")[0].name == "step-00000001.pt"
    assert "step-00000002.pt is damaged or missing" in caplog.text


def test_save_after_a_fall_back_keeps_what_is_new(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(500, 0.3), is_best=True)
    for step in (1900, 2000):
        folder.save(make(step), is_best=False)
    for step in (1900, 2000):
        (tmp_path / "checkpoints" / f"step-{step:08d}.pt").write_bytes(b"damaged")
    assert folder.find("latest")[1] == 500
    folder.save(make(1000), is_best=False)
    assert folder.find("latest") == (tmp_path / "checkpoints" / "step-00001000.pt", 1000)
    assert folder.latest_step() == 1000
    assert folder.find("best")[1] == 500


def test_find_when_all_are_damaged_says_so(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1), is_best=False).write_bytes(b"")
    with pytest.raises(UserError) as caught:
        folder.find("latest")
    assert "no checkpoint is whole: step-00000001.pt" in caught.value.what
    assert caught.value.where.endswith("checkpoints")
    assert "train anew" in caught.value.fix


def test_find_without_checkpoint_says_to_train(tmp_path):
    with pytest.raises(UserError) as caught:
        CheckpointFolder(tmp_path).find("best")
    assert "no checkpoint yet" in caught.value.what and "a run that has saved one" in caught.value.fix


def test_load_file_that_is_foreign_is_refused(tmp_path):
    torch.save({"model": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="not a checkpoint of xla_b2t"):
        load_file(tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UserError, match=r"text\.pt is not a whole checkpoint"):
        load_file(tmp_path / "text.pt")
    with pytest.raises(UserError, match="No such file"):
        load_file(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": None}, "it has no version"),
        ({"state": None}, "Expected `object`, got `null` - at `$.state`"),
        ({"state": {"weights": {"w": 3}}}, "Expected `Tensor`, got `int` - at `$.state.weights[...]`"),
        ({"config": 3}, "Expected `str`, got `int` - at `$.config`"),
        ({"sessions": "monday"}, "Expected `array`, got `str` - at `$.sessions`"),
    ],
)
def test_load_file_that_lacks_a_part_is_refused(tmp_path, change, what):
    path = CheckpointFolder(tmp_path).save(make(1), is_best=False)
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(UserError) as caught:
        load_file(path)
    assert caught.value.what == f"step-00000001.pt is not a whole checkpoint: {what}"
    assert (caught.value.where, caught.value.fix) == (str(path), "use another")


def test_load_file_that_is_nothing_but_its_format_is_refused(tmp_path):
    torch.save({"format": "xla_b2t.checkpoint"}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt is not a whole checkpoint: it has no version"):
        load_file(tmp_path / "a.pt")
    torch.save({"format": "xla_b2t.checkpoint", "version": 1}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt is not a whole checkpoint: Object missing required field `step`"):
        load_file(tmp_path / "a.pt")


def test_load_file_leaves_weights_and_moments_in_the_file_until_they_are_dropped(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = folder.save(make(1), is_best=False)
    checkpoint = load_file(path)
    assert _is_mapped(path)
    for step in (2, 3):
        folder.save(make(step), is_best=False)
    assert not path.exists()
    torch.testing.assert_close(vars(checkpoint.state), vars(make(1).state), rtol=0, atol=0)
    fixed = checkpoint.state.fixed
    del checkpoint
    gc.collect()
    assert not _is_mapped(path), "frozen parameters and buffers, which a run keeps, must not hold the file"
    assert fixed["b"].tolist() == [1, 1]


def _is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


def test_load_file_of_newer_version_asks_to_upgrade(tmp_path):
    path = CheckpointFolder(tmp_path).save(make(1), is_best=False)
    values = torch.load(path, weights_only=True)
    torch.save({**values, "version": 2}, path)
    with pytest.raises(UserError) as caught:
        load_file(path)
    assert "checkpoint version 2, this program reads up to 1" in caught.value.what
    assert caught.value.fix == "upgrade xla_b2t"


def test_manifest_that_is_broken_is_refused_and_files_stay(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = folder.save(make(1), is_best=False)
    (tmp_path / "checkpoints" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest cannot be read"):
        folder.save(make(2), is_best=False)
    assert path.exists()


def test_save_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1), is_best=False)
    before = (tmp_path / "checkpoints" / "manifest.json").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError) as caught:
        folder.save(make(2), is_best=True)
    assert "No space left on device" in caught.value.what and "free some space" in caught.value.fix
    monkeypatch.undo()
    assert (tmp_path / "checkpoints" / "manifest.json").read_bytes() == before
    assert folder.find("latest")[0].name == "step-00000001.pt"
    folder.save(make(3), is_best=False)
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_save_beyond_the_size_a_disk_takes_says_why_and_keeps_the_one_before(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1), is_best=True)
    large = dataclasses.replace(make(2), state=dataclasses.replace(make(2).state, weights={"w": torch.ones(100_000)}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            folder.save(large, is_best=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.what == "the checkpoint cannot be written: File too large"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["manifest.json", "step-00000001.pt"]
    assert folder.find("best")[0].name == "step-00000001.pt"


def test_checkpoint_loads_without_torch_xla(tmp_path):
    path = CheckpointFolder(tmp_path).save(make(3), is_best=False)
    code = (
        "import sys, torch; values = torch.load(sys.argv[1], weights_only=True); "
        "print(values['step'], values['state']['weights']['w'].device, 'torch_xla' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["3", "cpu", "False"]


def test_manifest_names_hash_of_every_file(tmp_path):
    CheckpointFolder(tmp_path).save(make(3, 0.25), is_best=True)
    manifest = json.loads((tmp_path / "checkpoints" / "manifest.json").read_text())
    entry = manifest["files"]["step-00000003.pt"]
    assert (manifest["version"], manifest["latest"], manifest["best"]) == (1, "step-00000003.pt", "step-00000003.pt")
    assert len(entry["sha256"]) == 64 and entry["val_per"] == 0.25
