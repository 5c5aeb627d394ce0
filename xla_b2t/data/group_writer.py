"""Writing one split's groups, so that a file under its own name is always a whole one.

In: groups as arrays, one at a time. Out: an HDF5 file as docs/FORMAT.md describes, and what its index says.
Which trials a group holds is left to `grouping`, reading it back to `groups`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from xla_b2t.data.group_format import FORMAT, FORMAT_VERSION, SMALL_DATASETS, group_checksum, group_name
from xla_b2t.files import replacing

# Mapped features must start at a multiple of their element size; whole cache lines cost nothing more.
_ALIGNMENT_BYTES = 64


def write_split(
    path: Path, groups: Iterable[tuple[int, dict[str, np.ndarray]]], attributes: dict[str, Any], labelled: bool
) -> dict[str, np.ndarray]:
    """Writes groups in the order in which they come; the file gets its name when it is complete and on disk.

    Args:
        path: where the file shall be.
        groups: bucket and arrays of each group: `features` uint16 (B, T, C) and the small datasets of docs/FORMAT.md.
        attributes: put on the root beside the format's own.
        labelled: whether the labels mean anything.

    Returns:
        The tables of the index, by their names in the file.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    rows = []
    # No time stamps and a fixed layout: the same groups give the same bytes.
    layout = {"alignment_threshold": 1, "alignment_interval": _ALIGNMENT_BYTES}
    with replacing(path) as partial, h5py.File(partial, "w", **layout) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = FORMAT_VERSION
        for name, value in attributes.items():
            file.attrs[name] = value
        for group, (bucket, arrays) in enumerate(groups):
            node = file.create_group(f"groups/{group_name(group)}")
            features = node.create_dataset("features", data=arrays["features"], track_times=False)
            features.attrs["dtype"] = "bfloat16"
            for name in SMALL_DATASETS:
                node.create_dataset(name, data=arrays[name], track_times=False)
            rows.append(_index_row(bucket, arrays))
        index = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        for name, table in index.items():
            file.create_dataset(f"index/{name}", data=table, track_times=False)
        file.attrs["labelled"] = labelled
        file.attrs["max_label"] = max(int(row_max) for row_max in index["max_label"])
        file.attrs["complete"] = True
    return index


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes JSON with the same care as a split; it comes last, and says that the folder is complete."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _index_row(bucket: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "bucket": np.int32(bucket),
        "day": np.int32(arrays["days"][0]),
        "num_valid": np.int32(arrays["valid"].sum()),
        "real_bins": np.int64(arrays["input_bins"].sum()),
        "input_bins": arrays["input_bins"],
        "label_lengths": arrays["label_lengths"],
        "required_steps": arrays["required_steps"],
        "max_label": np.int32(arrays["labels"].max()),
        "checksum": np.uint32(group_checksum(arrays["features"], arrays)),
    }
