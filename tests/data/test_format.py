"""docs/FORMAT.md says what is in the files: everything that is there, and nothing else."""

import json
import re
from pathlib import Path

import h5py
import pytest

from xla_b2t.data import scan, trials

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/FORMAT.md").read_text(encoding="utf-8")


def section(start, end):
    (text,) = re.findall(f"{re.escape(start)}(.*?){re.escape(end)}", TEXT, flags=re.DOTALL)
    return text


def first_column(text):
    return [
        name for row in re.findall(r"^\| (`[^|]*)\|", text, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]


def named(text):
    return set(re.findall(r"`(\w+)`", text))


@pytest.fixture(scope="module")
def opened(conversion):
    with h5py.File(Path(conversion.folder) / "train-0000.h5", "r") as file:
        yield file


def test_format_trial_table_has_what_a_simulated_trial_has(simulation):
    path = next(simulation.glob("*/data_train.hdf5"))
    with h5py.File(path, "r") as file:
        assert set(first_column(section("## Trials", "### What is refused"))) == {
            *file["trial_0000"],
            *file["trial_0000"].attrs,
        }
        assert set(file.attrs) == {"simulated", "settings"}


def test_format_group_table_has_the_datasets_of_a_group_in_the_order_of_the_checksum(opened):
    from xla_b2t.data.group_format import SMALL_DATASETS

    names = first_column(section("`/groups/NNNN/`", "`/index/`"))
    assert names == ["features", *SMALL_DATASETS]
    assert set(names) == set(opened["groups/0000"])
    assert all(opened["groups/0000"][name].chunks is None for name in names)
    assert opened["groups/0000/features"].attrs["dtype"] == "bfloat16"


def test_format_index_and_attributes_are_the_ones_of_the_files(opened, conversion):
    tables = named(section("`/index/`, one row a group:", "Root attributes"))
    assert set(opened["index"]) | {"features", "trial_ids"} == tables
    assert set(opened) == {"groups", "index", "refused"}
    attributes = named(section("Root attributes:", "### `index.h5`"))
    assert set(opened.attrs) <= attributes
    with h5py.File(Path(conversion.folder) / "index.h5", "r") as index:
        assert set(index["train"]) == set(opened["index"]) | {"file", "place"}
        assert set(index.attrs) == set(opened.attrs) - {"complete"}


def test_format_source_keys_are_the_ones_of_the_file(conversion):
    made_from = json.loads((Path(conversion.folder) / "source.json").read_text())
    assert named(section("### `source.json`", "When a folder")) == {*made_from, *made_from["files"][0]}


def test_format_manifest_keys_are_the_ones_of_the_manifest(conversion):
    manifest = json.loads((Path(conversion.folder) / "report.json").read_text())
    split = manifest["splits"]["train"]
    described = named(section("### `report.json`", "A reader refuses"))
    keys = set(manifest) | set(split) | set(split["files"][0]) | set(manifest["index"])
    assert keys | set(manifest["buckets"][0]) | {"trial_id", "reason", "detail"} == described


def test_format_reasons_are_the_ones_that_trials_are_refused_for():
    code = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (trials, scan))
    reasons = set(re.findall(r'(?:_Fault\(|_id, )"([a-z_]+)"', code))
    assert set(first_column(section("### What is refused", "A file that cannot be opened"))) == reasons
