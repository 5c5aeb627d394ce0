"""How groups are stored is told from metadata alone: each way of being wrong once, its first place and its count."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from xla_b2t.data.group_layout import Mismatch, mismatches
from xla_b2t.data.groups import open_group_set
from xla_b2t.errors import UserError


@pytest.fixture
def copied(conversion, tmp_path):
    """A copy of the groups to change."""
    return Path(shutil.copytree(conversion.folder, tmp_path / "groups"))


def changed(folder, change, split="train"):
    """The mismatches after `change(file)`; the manifest learns the file's new size."""
    path = folder / f"{split}-0000.h5"
    with h5py.File(path, "a") as file:
        change(file)
    manifest = json.loads((folder / "report.json").read_text())
    manifest["splits"][split]["files"][0]["bytes"] = path.stat().st_size
    (folder / "report.json").write_text(json.dumps(manifest))
    return mismatches(open_group_set(folder))


def put(node, name, values, **options):
    del node[name]
    node.create_dataset(name, data=values, **options)


def number_of_groups(folder):
    return len(open_group_set(folder).splits["train"].bucket_G)


def test_mismatches_of_groups_as_prebatch_writes_them_are_none(copied):
    assert changed(copied, lambda file: None) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_mismatches_of_floating_point_features_name_their_type_once_with_the_count(copied, dtype):
    def change(file):
        for name in ("0001", "0002"):
            node = file[f"groups/{name}"]
            put(node, "features", node["features"][()].astype(dtype))

    (found,) = changed(copied, change)
    assert found == Mismatch(
        split="train",
        dataset="features",
        where=f"{copied}/train-0000.h5:/groups/0001/features",
        found=dtype,
        expected="uint16, the bits of bfloat16",
        groups=2,
        of=number_of_groups(copied),
    )


@pytest.mark.parametrize(
    ("dataset", "dtype", "expected"),
    [
        ("labels", "int64", "int32"),
        ("labels", ">i4", "int32"),
        ("input_bins", "int64", "int32"),
        ("label_lengths", "float32", "int32"),
        ("required_steps", "uint32", "int32"),
        ("days", "int16", "int32"),
        ("valid", "int32", "uint8"),
        ("valid", "int8", "uint8"),
        ("features", "int16", "uint16, the bits of bfloat16"),
    ],
)
def test_mismatches_of_a_dataset_of_another_type_say_both(copied, dataset, dtype, expected):
    def change(file):
        for node in file["groups"].values():
            values = node[dataset][()].astype(dtype)
            put(node, dataset, values)
            if dataset == "features":
                node[dataset].attrs["dtype"] = "bfloat16"

    (found,) = changed(copied, change)
    assert (found.dataset, found.found, found.expected) == (dataset, dtype, expected)
    assert found.where == f"{copied}/train-0000.h5:/groups/0000/{dataset}"
    assert found.groups == found.of == number_of_groups(copied)


def test_mismatches_of_two_types_of_one_dataset_are_two(copied):
    def change(file):
        for name, dtype in (("0000", "float64"), ("0001", "float32"), ("0003", "float32")):
            put(file[f"groups/{name}"], "features", file[f"groups/{name}/features"][()].astype(dtype))

    found = changed(copied, change)
    assert [(each.found, each.groups, each.where[-13:]) for each in found] == [
        ("float64", 1, "0000/features"),
        ("float32", 2, "0001/features"),
    ]


def test_mismatches_of_trial_ids_of_varying_length_are_told(copied):
    def change(file):
        put(file["groups/0000"], "trial_ids", [b"a", b"b", b"c", b"d"], dtype=h5py.string_dtype())

    (found,) = changed(copied, change)
    assert (found.dataset, found.found, found.expected) == ("trial_ids", "object", "bytes of one length")


@pytest.mark.parametrize(
    ("attribute", "text"), [(None, "None"), ("float16", "'float16'"), (b"half", "'half'"), (7, "'7'")]
)
def test_mismatches_of_features_that_do_not_say_bfloat16_name_the_attribute(copied, attribute, text):
    def change(file):
        attrs = file["groups/0002/features"].attrs
        del attrs["dtype"]
        if attribute is not None:
            attrs["dtype"] = attribute

    (found,) = changed(copied, change)
    assert found.found == f"uint16 with the attribute dtype = {text}"
    assert found.expected == "the attribute dtype = 'bfloat16'"
    assert found.where == f"{copied}/train-0000.h5:/groups/0002/features"


@pytest.mark.parametrize(
    ("dataset", "cut"),
    [("features", np.s_[:, :-1]), ("features", np.s_[:, :, :-1]), ("labels", np.s_[:, :-1]), ("days", np.s_[:-1])],
)
def test_mismatches_of_another_shape_give_that_of_the_first_and_of_its_bucket(copied, dataset, cut):
    before = {}

    def change(file):
        for name in ("0000", "0003"):
            node = file[f"groups/{name}"]
            before.setdefault("shape", node[dataset].shape)
            values = node[dataset][()][cut]
            before.setdefault("now", values.shape)
            put(node, dataset, values)
            if dataset == "features":
                node[dataset].attrs["dtype"] = "bfloat16"

    (found,) = changed(copied, change)
    assert found.found == f"shape {before['now']}"
    assert found.expected == f"{before['shape']}" + ("" if dataset == "days" else ", of its bucket")
    assert (found.dataset, found.groups, found.where) == (dataset, 2, f"{copied}/train-0000.h5:/groups/0000/{dataset}")


def test_mismatches_of_chunked_features_say_that_they_cannot_be_mapped(copied):
    def change(file):
        node = file["groups/0001"]
        put(node, "features", node["features"][()], compression="gzip")
        node["features"].attrs["dtype"] = "bfloat16"

    (found,) = changed(copied, change)
    assert found.found == "chunked, compressed or empty"
    assert found.expected == "contiguous, so that it can be mapped"
    assert found.where == f"{copied}/train-0000.h5:/groups/0001/features"


def test_mismatches_of_a_missing_dataset_or_group_are_told(copied):
    def change(file):
        del file["groups/0001/days"]
        del file["groups/0002"]
        del file["groups/0003/labels"]
        file.create_group("groups/0003/labels")

    found = {each.where: each for each in changed(copied, change)}
    assert found.keys() == {f"{copied}/train-0000.h5:/groups/{place}" for place in ("0001/days", "0002", "0003/labels")}
    assert found[f"{copied}/train-0000.h5:/groups/0001/days"].found == "no such dataset"
    assert found[f"{copied}/train-0000.h5:/groups/0001/days"].expected == "int32"
    assert found[f"{copied}/train-0000.h5:/groups/0002"].found == "no such group"
    assert found[f"{copied}/train-0000.h5:/groups/0002"].expected == "a group for each row of the index"


def test_mismatches_of_every_split_are_told(copied):
    def change(file):
        put(file["groups/0000"], "labels", file["groups/0000/labels"][()].astype(np.int64))

    changed(copied, change)
    found = changed(copied, change, "val")
    assert [(each.split, each.found) for each in found] == [("train", "int64"), ("val", "int64")]


def test_mismatches_of_a_file_without_groups_is_a_user_error(copied):
    group_set = open_group_set(copied)
    with h5py.File(copied / "train-0000.h5", "a") as file:
        del file["groups"]
    with pytest.raises(UserError) as caught:
        mismatches(group_set)
    assert caught.value.what.startswith("the groups cannot be read: ")
    assert caught.value.where == f"{copied}/train-0000.h5:/groups"
    assert caught.value.fix == "run xla_b2t prebatch again"


def test_mismatches_read_no_dataset(copied, monkeypatch):
    group_set = open_group_set(copied)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", None)
    monkeypatch.setattr(np, "frombuffer", None)
    assert mismatches(group_set) == []
