import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import Bucket, open_group_set
from xla_b2t.errors import UserError


@pytest.fixture
def copied(conversion, tmp_path):
    """A copy of the groups to damage."""
    return Path(shutil.copytree(conversion.folder, tmp_path / "groups"))


def change_manifest(folder, **changes):
    path = folder / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_file(folder, change):
    """Changes an HDF5 file, and lets the manifest agree on its size."""
    path = folder / "train-0000.h5"
    with h5py.File(path, "a") as file:
        change(file)
    manifest = json.loads((folder / "report.json").read_text())
    manifest["splits"]["train"]["files"][0]["bytes"] = path.stat().st_size
    change_manifest(folder, splits=manifest["splits"])


def assert_open_refuses(folder, what, where, fix):
    with pytest.raises(UserError) as raised:
        open_group_set(folder)
    assert what in raised.value.what
    assert raised.value.where == str(where)
    assert fix in raised.value.fix


def features_offset(path, group):
    with h5py.File(path, "r") as file:
        return file[f"groups/{group:04d}/features"].id.get_offset()


def test_open_group_set_tells_what_was_converted(conversion):
    group_set = open_group_set(conversion.folder)
    assert (group_set.num_features, group_set.num_classes, group_set.group_size) == (16, 41, 4)
    assert (group_set.patch_bins, group_set.patch_stride, group_set.version) == (4, 2, 2)
    assert group_set.sessions == conversion.sessions == tuple(sorted(group_set.sessions))
    assert group_set.buckets == conversion.buckets
    assert all(isinstance(bucket, Bucket) for bucket in group_set.buckets)
    train = group_set.splits["train"]
    assert train.bucket_G.dtype == train.days_GB.dtype == train.num_valid_G.dtype == np.int32
    assert (train.valid_GB.dtype, train.checksum_G.dtype) == (bool, np.uint32)
    assert train.place(2) == f"{conversion.folder}/train-0000.h5:/groups/0002"
    assert train.where == f"{conversion.folder}/index.h5:/train"
    assert train.real_bins_G.dtype == np.int64
    assert train.input_bins_GB.shape == train.required_steps_GB.shape == (len(train.bucket_G), 4)
    np.testing.assert_array_equal(train.input_bins_GB.sum(axis=1), train.real_bins_G)
    np.testing.assert_array_equal((train.input_bins_GB > 0).sum(axis=1), train.num_valid_G)
    assert train.max_label == 40
    assert train.labelled
    assert group_set.splits["test"].max_label == 0
    assert not group_set.splits["test"].labelled


def test_open_group_set_keeps_no_file_open(copied):
    open_group_set(copied)
    open_files = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [name for name in open_files if name.startswith(str(copied))]


def test_open_group_set_missing_folder_is_a_user_error(tmp_path):
    assert_open_refuses(tmp_path / "no", "there is no such folder", tmp_path / "no", "xla_b2t prebatch")


def test_open_group_set_other_folder_is_a_user_error(tmp_path):
    assert_open_refuses(tmp_path, "this is not a folder of groups", tmp_path, "data.dir")


def test_open_group_set_unfinished_conversion_is_a_user_error(copied):
    (copied / "report.json").unlink()
    (copied / "val-0000.h5").rename(copied / "val-0000.h5.partial")
    what = "still writing, or was interrupted: index.h5, source.json, test-0000.h5 and 2 more, but no report.json"
    assert_open_refuses(copied, what, copied, "wait for it, or run xla_b2t prebatch again")


def test_open_group_set_conversion_that_has_just_begun_is_a_user_error(tmp_path):
    (tmp_path / "source.json").write_text("{}")
    assert_open_refuses(tmp_path, "the converter is still writing, or was interrupted: source.json", tmp_path, "wait")


def test_open_group_set_newer_version_is_a_user_error(copied):
    change_manifest(copied, version=3)
    assert_open_refuses(copied, "format version 3, this program reads version 2", copied / "report.json", "install")


def test_open_group_set_older_version_is_a_user_error(copied):
    change_manifest(copied, version=1)
    what = "the groups have format version 1, this program reads version 2"
    assert_open_refuses(copied, what, copied / "report.json", "run xla_b2t prebatch again")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_open_group_set_manifest_that_is_no_manifest_is_a_user_error(copied, text):
    (copied / "report.json").write_bytes(text.encode("latin-1"))
    assert_open_refuses(copied, "the manifest cannot be read", copied / "report.json", "prebatch again")


def test_open_group_set_manifest_of_something_else_is_a_user_error(copied):
    change_manifest(copied, format="accounts")
    assert_open_refuses(copied, "format 'accounts'", copied / "report.json", "prebatch again")


def test_open_group_set_manifest_without_a_key_is_a_user_error(copied):
    manifest = json.loads((copied / "report.json").read_text())
    del manifest["buckets"]
    (copied / "report.json").write_text(json.dumps(manifest))
    assert_open_refuses(copied, "missing required field `buckets`", copied / "report.json", "prebatch again")


def test_open_group_set_missing_split_is_a_user_error(copied):
    (copied / "val-0000.h5").unlink()
    assert_open_refuses(copied, "lists val-0000.h5, but it is missing", copied / "val-0000.h5", "prebatch again")


def test_open_group_set_truncated_file_is_a_user_error(copied):
    path = copied / "train-0000.h5"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 100)
    assert_open_refuses(copied, f"has {size - 100} bytes, expected {size}", path, "copy it again")


def test_open_group_set_damaged_index_is_a_user_error(copied):
    path = copied / "index.h5"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert_open_refuses(copied, "the index is damaged: checksum", path, "copy it again")


def test_open_group_set_index_of_another_conversion_is_a_user_error(copied):
    change_manifest(copied, conversion="0" * 16)
    assert_open_refuses(copied, "another conversion", copied / "index.h5", "prebatch again")


def test_open_group_set_with_fewer_sessions_than_the_index_has_is_a_user_error(copied):
    change_manifest(copied, sessions=["one"])
    what = "the index is damaged: days goes from 0 to 1, expected 0 to 0"
    assert_open_refuses(copied, what, f"{copied}/index.h5:/train/days", "prebatch again")


def test_open_group_set_with_another_group_size_than_the_index_has_is_a_user_error(copied):
    change_manifest(copied, group_size=5)
    assert_open_refuses(copied, "groups of 5 trials", f"{copied}/index.h5:/train", "prebatch again")


def test_reader_of_a_file_with_other_content_of_the_same_size_is_a_user_error(copied):
    path = copied / "train-0000.h5"
    path.write_bytes(bytes(path.stat().st_size))
    group_set = open_group_set(copied)
    reader = GroupReader(group_set, "train")
    for _ in range(2):
        with pytest.raises(UserError, match=r"the group is damaged: checksum \w{8}, expected \w{8}") as raised:
            reader.read([0], group_set.splits["train"].bucket_G[0])
        assert raised.value.where == f"{path}:/groups/0000/features"
        assert raised.value.fix == "run xla_b2t prebatch again"


def test_reader_needs_nothing_of_hdf5s_own_in_a_file(copied):
    """What HDF5 keeps to find its way may be damaged; what a group holds is found by the index."""
    path = copied / "train-0000.h5"
    group_set = open_group_set(copied)
    index = group_set.splits["train"]
    before = GroupReader(group_set, "train").read([1], index.bucket_G[1])
    content = bytearray(path.read_bytes())
    content[: index.offsets_GN.min()] = bytes(index.offsets_GN.min())
    path.write_bytes(content)
    after = GroupReader(group_set, "train").read([1], index.bucket_G[1])
    np.testing.assert_array_equal(after.features_BTC, before.features_BTC)
    assert after.trial_ids == before.trial_ids


def test_reader_of_a_selection_leaves_out_trials_and_picks_columns(conversion):
    group_set = open_group_set(conversion.folder)
    index = group_set.splits["train"]
    group = int(np.flatnonzero(index.num_valid_G == 4)[0])
    bucket = index.bucket_G[group]
    whole = GroupReader(group_set, "train").read([group], bucket)
    valid_GB = index.valid_GB.copy()
    valid_GB[group, 1] = False
    selected = replace(
        group_set,
        splits={"train": replace(index, valid_GB=valid_GB)},
        columns=((2, 5), (8, 16)),
        num_features=11,
    )
    for _ in range(2):
        batch = GroupReader(selected, "train").read([group], bucket)
        kept = [0, 2, 3]
        columns = [*range(2, 5), *range(8, 16)]
        np.testing.assert_array_equal(batch.features_BTC[kept], whole.features_BTC[kept][..., columns])
        assert not batch.features_BTC[1].any() and not batch.labels_BL[1].any()
        assert batch.trial_ids[1] == "" and not batch.valid_B[1]
        assert not any(
            values[1] for values in (batch.input_bins_B, batch.label_lengths_B, batch.required_steps_B, batch.days_B)
        )
        assert whole.trial_ids[1] != "" and batch.trial_ids[2] == whole.trial_ids[2]


def test_reader_one_group_is_a_private_map_of_the_file(copied):
    group_set = open_group_set(copied)
    reader = GroupReader(group_set, "train")
    batch = reader.read([0], group_set.splits["train"].bucket_G[0])
    assert batch.features_BTC.dtype == np.uint16
    assert not batch.features_BTC.flags.owndata
    assert batch.features_BTC.flags.writeable  # so that torch takes it without a warning
    before = (copied / "train-0000.h5").read_bytes()
    batch.features_BTC[:] = 7
    assert (copied / "train-0000.h5").read_bytes() == before
    reader.close()
    assert (batch.features_BTC == 7).all()  # what was read outlives the reader


def test_reader_several_groups_follow_each_other(conversion):
    group_set = open_group_set(conversion.folder)
    index = group_set.splits["train"]
    bucket = int(np.bincount(index.bucket_G).argmax())
    groups = [int(group) for group in np.flatnonzero(index.bucket_G == bucket)[:2]]
    shape = group_set.buckets[bucket]
    with GroupReader(group_set, "train") as reader:
        both = reader.read([groups[1], -1, groups[0]], bucket)
        single = [reader.read([group], bucket) for group in groups]
    assert both.features_BTC.shape == (12, shape.input_bins, 16)
    assert both.labels_BL.shape == (12, shape.label_slots)
    assert both.labels_BL.dtype == both.input_bins_B.dtype == both.days_B.dtype == np.int32
    assert both.valid_B.dtype == bool
    np.testing.assert_array_equal(both.features_BTC[:4], single[1].features_BTC)
    np.testing.assert_array_equal(both.features_BTC[8:], single[0].features_BTC)
    assert both.trial_ids == (*single[1].trial_ids, "", "", "", "", *single[0].trial_ids)


def test_reader_empty_group_is_all_zero(conversion):
    group_set = open_group_set(conversion.folder)
    batch = GroupReader(group_set, "train").read([-1], 1)
    assert batch.features_BTC.shape == (4, group_set.buckets[1].input_bins, 16)
    arrays = (batch.features_BTC, batch.labels_BL, batch.input_bins_B, batch.label_lengths_B, batch.required_steps_B)
    assert not any(array.any() for array in (*arrays, batch.days_B, batch.valid_B))
    assert batch.trial_ids == ("",) * 4


def test_reader_pickled_after_reading_opens_its_own_file(conversion):
    group_set = open_group_set(conversion.folder)
    bucket = group_set.splits["train"].bucket_G[0]
    reader = GroupReader(group_set, "train")
    first = reader.read([0], bucket)
    copy = pickle.loads(pickle.dumps(reader))
    reader.close()
    np.testing.assert_array_equal(copy.read([0], bucket).features_BTC, first.features_BTC)
    np.testing.assert_array_equal(reader.read([0], bucket).features_BTC, first.features_BTC)
    copy.close()
    reader.close()


def test_reader_unknown_split_is_a_user_error(conversion):
    with pytest.raises(UserError) as raised:
        GroupReader(open_group_set(conversion.folder), "dev")
    assert raised.value.what == "there is no split 'dev'; there are train, val, test"
    assert raised.value.where == conversion.folder
    assert "data_dev.hdf5" in raised.value.fix


@pytest.mark.parametrize("split", ["train", "test"])
def test_reader_changed_byte_is_found_on_the_first_read(copied, split):
    path = copied / f"{split}-0000.h5"
    with open(path, "r+b") as file:
        file.seek(features_offset(path, 1) + 8)
        file.write(b"\xaa")
    group_set = open_group_set(copied)
    buckets = group_set.splits[split].bucket_G
    with GroupReader(group_set, split) as reader:
        reader.read([0], buckets[0])
        with pytest.raises(UserError) as raised:
            reader.read([1], buckets[1])
    assert "the group is damaged: checksum" in raised.value.what
    assert raised.value.where == f"{path}:/groups/0001/features"
    assert "prebatch again" in raised.value.fix
    with GroupReader(group_set, split, verify=False) as reader:
        reader.read([1], buckets[1])


def test_reader_changed_label_is_found_too(copied):
    def change(file):
        file["groups/0000/labels"][0, 0] += 1

    change_file(copied, change)
    group_set = open_group_set(copied)
    with pytest.raises(UserError, match="damaged"), GroupReader(group_set, "train") as reader:
        reader.read([0], group_set.splits["train"].bucket_G[0])


def test_reader_file_that_shrinks_after_opening_is_a_user_error_not_a_crash(copied):
    group_set = open_group_set(copied)
    index = group_set.splits["train"]
    last = len(index.bucket_G) - 1
    end = features_offset(copied / "train-0000.h5", last) + 8
    with GroupReader(group_set, "train") as reader:
        reader.read([0], index.bucket_G[0])
        with open(copied / "train-0000.h5", "r+b") as file:
            file.truncate(end)
        with pytest.raises(UserError) as raised:
            reader.read([last], index.bucket_G[last])
    assert raised.value.where == f"{copied / 'train-0000.h5'}:/groups/{last:04d}/features"


def test_padding_efficiency_counts_padding_and_empty_slots(conversion):
    group_set = open_group_set(conversion.folder)
    for split, index in group_set.splits.items():
        stored = sum(group_set.buckets[bucket].input_bins * 4 for bucket in index.bucket_G)
        assert group_set.padding_efficiency(split) == pytest.approx(index.input_bins_GB.sum() / stored)
