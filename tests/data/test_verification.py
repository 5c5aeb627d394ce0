"""Each way in which a folder of groups can be wrong is told, all of them at once, with its place."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from xla_b2t.data.verification import Fault, verify

AGAIN = "run xla_b2t prebatch again"


@pytest.fixture
def copied(conversion, tmp_path):
    """A copy of the groups to damage."""
    return Path(shutil.copytree(conversion.folder, tmp_path / "groups"))


def flip(path, group, dataset="features"):
    with h5py.File(path, "r") as file:
        offset = file[f"groups/{group:04d}/{dataset}"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_verify_of_groups_as_prebatch_writes_them_looks_at_all_and_finds_nothing(conversion, workers):
    found = verify(conversion.folder, workers)
    assert found.faults == ()
    assert found.files == 3
    assert found.groups == sum(split.groups for split in conversion.splits.values())
    assert found.bytes == sum(split.stored_bins for split in conversion.splits.values()) * 16 * 2


def test_verify_tells_all_that_is_wrong(copied):
    flip(copied / "train-0000.h5", 1)
    flip(copied / "train-0000.h5", 3, "labels")
    with open(copied / "val-0000.h5", "r+b") as file:
        file.truncate(5000)
    (copied / "test-0000.h5").unlink()
    (copied / "train-0007.h5").write_bytes(b"")
    (copied / "train-0008.h5.partial").write_bytes(b"")
    found = {fault.where: fault for fault in verify(copied, 2).faults}
    assert {where.removeprefix(f"{copied}/"): fault.what.partition(":")[0] for where, fault in found.items()} == {
        "train-0000.h5:/groups/0001/features": "the group is damaged",
        "train-0000.h5:/groups/0003/features": "the group is damaged",
        "val-0000.h5": f"the file has 5000 bytes, expected {size_in_manifest(copied, 'val')}",
        "test-0000.h5": "the manifest lists test-0000.h5, but it is missing",
        "train-0007.h5": "the manifest does not list this file",
        "train-0008.h5.partial": "the converter is still writing, or was interrupted",
    }
    assert {fault.fix for fault in found.values()} == {
        AGAIN, f"copy it again, or {AGAIN}", f"remove it, or {AGAIN}", f"wait for it, or {AGAIN}"
    }  # fmt: skip


def size_in_manifest(folder, split):
    return json.loads((folder / "report.json").read_text())["splits"][split]["files"][0]["bytes"]


def test_verify_of_another_layout_tells_it_in_place_of_the_checksum(copied):
    path = copied / "train-0000.h5"
    with h5py.File(path, "a") as file:
        values = file["groups/0002/labels"][()].astype(np.int64)
        del file["groups/0002/labels"]
        file["groups/0002/labels"] = values
    manifest = json.loads((copied / "report.json").read_text())
    manifest["splits"]["train"]["files"][0]["bytes"] = path.stat().st_size
    (copied / "report.json").write_text(json.dumps(manifest))
    what, where = "int64 in 1 groups, expected int32", f"{path}:/groups/0002/labels"
    assert verify(copied).faults == (Fault(what, where, AGAIN),)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / "report.json").unlink(), "the converter is still writing, or was interrupted"),
        (lambda folder: (folder / "report.json").write_text("{"), "the manifest cannot be read"),
        (lambda folder: change(folder, version=1), "the groups have format version 1"),
        (lambda folder: change(folder, splits={"train": {}}), "the manifest is damaged: Object missing"),
        (lambda folder: change(folder, splits=[]), "the manifest is damaged"),
        (lambda folder: flip_byte(folder / "index.h5"), "the index is damaged: checksum"),
        (lambda folder: (folder / "index.h5").unlink(), "the manifest lists index.h5, but it is missing"),
        (shutil.rmtree, "there is no such folder"),
    ],
)
def test_verify_of_a_folder_that_cannot_be_opened_is_one_fault(copied, damage, what):
    damage(copied)
    (fault,) = verify(copied).faults
    assert fault.what.startswith(what)
    assert fault.where and fault.fix


def change(folder, **changes):
    path = folder / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_verify_of_a_file_of_another_conversion_names_it(copied, conversion):
    shutil.copy(copied / "train-0000.h5", copied / "val-0000.h5")
    change_size(copied, "val")
    faults = verify(copied).faults
    assert any(fault.where.startswith(f"{copied}/val-0000.h5") for fault in faults)


def change_size(folder, split):
    manifest = json.loads((folder / "report.json").read_text())
    manifest["splits"][split]["files"][0]["bytes"] = (folder / f"{split}-0000.h5").stat().st_size
    (folder / "report.json").write_text(json.dumps(manifest))
