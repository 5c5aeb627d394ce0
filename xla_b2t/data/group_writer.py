"""Writing groups, so that a file under its own name is always a whole one.

In: groups as arrays, one at a time; what is known of all of them. Out: parts, the index and the manifest, as
docs/FORMAT.md describes them. Which trials a group holds is left to `grouping`, reading it back to `group_reader`.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from xla_b2t.data.group_format import (
    DATASETS,
    FORMAT,
    FORMAT_VERSION,
    OFFSETS,
    SMALL_DATASETS,
    TABLES_G,
    TABLES_GB,
    group_name,
    small_checksum,
)
from xla_b2t.data.trials import Refusal
from xla_b2t.files import replacing

# Mapped features must start at a multiple of their element size; whole cache lines cost nothing more.
_ALIGNMENT_BYTES = 64
# No time stamps and a fixed layout: the same groups give the same bytes.
_LAYOUT = {"alignment_threshold": 1, "alignment_interval": _ALIGNMENT_BYTES}


@dataclass(frozen=True, eq=False)
class PaddedGroup:
    """A group as it is stored.

    Attributes:
        bucket: its bucket.
        pass_number: the grouping it belongs to.
        features_BTC: uint16, the bits of bfloat16.
        features_checksum: CRC-32 of them.
        small: the other datasets by name.
        blocks_B: int32, block of each trial.
    """

    bucket: int
    pass_number: int
    features_BTC: np.ndarray
    features_checksum: int
    small: dict[str, np.ndarray]
    blocks_B: np.ndarray


@dataclass(frozen=True, eq=False)
class Part:
    """A finished file of groups: its rows of the index, and the trials that were refused while it was written."""

    file: str
    bytes: int
    tables: dict[str, np.ndarray]
    refused: tuple[Refusal, ...]


def write_part(
    path: Path, groups: Iterable[PaddedGroup], refused: list[Refusal], group_size: int, conversion: str
) -> Part:
    """Writes groups in the order in which they come; the file gets its name when it is complete and on disk.

    Args:
        path: where the file shall be.
        groups: one at a time; there may be none.
        refused: trials that were refused on the way, read when all groups have come.
        group_size: trials a group, B.
        conversion: of the root's attribute.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    rows = []
    with replacing(path) as partial, h5py.File(partial, "w", **_LAYOUT) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = FORMAT_VERSION
        file.attrs["conversion"] = conversion
        for place, group in enumerate(groups):
            node = file.create_group(f"groups/{group_name(place)}")
            features = node.create_dataset("features", data=group.features_BTC, track_times=False)
            features.attrs["dtype"] = "bfloat16"
            for name in SMALL_DATASETS:
                node.create_dataset(name, data=group.small[name], track_times=False)
            rows.append({**_index_row(group), OFFSETS: [node[name].id.get_offset() for name in DATASETS]})
        tables = {name: np.array([row[name] for row in rows], kind) for name, kind in TABLES_G.items()}
        for name, kind in TABLES_GB.items():
            tables[name] = np.array([row[name] for row in rows], kind).reshape(len(rows), group_size)
        tables[OFFSETS] = np.array([row[OFFSETS] for row in rows], np.int64).reshape(len(rows), len(DATASETS))
        _write_tables(file, "index", tables)
        listed = json.dumps([asdict(refusal) for refusal in refused]).encode()
        file.create_dataset("refused", data=np.frombuffer(listed, np.uint8), track_times=False)
        file.attrs["complete"] = True
    return Part(path.name, path.stat().st_size, tables, tuple(refused))


def read_part(path: Path, conversion: str) -> Part | None:
    """What an earlier run finished; None where it is not whole or of another conversion."""
    try:
        with h5py.File(path, "r") as file:
            if not file.attrs.get("complete", False) or file.attrs.get("conversion") != conversion:
                return None
            tables = {name: file[f"index/{name}"][()] for name in (*TABLES_G, *TABLES_GB, OFFSETS)}
            refused = tuple(Refusal(**refusal) for refusal in json.loads(file["refused"][()].tobytes()))
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError):
        return None
    return Part(path.name, path.stat().st_size, tables, refused)


def write_index(path: Path, splits: dict[str, list[Part]], conversion: str) -> dict[str, Any]:
    """Brings the rows of all parts together.

    Returns:
        The index's entry of the manifest.
    """
    with replacing(path) as partial:
        with h5py.File(partial, "w", **_LAYOUT) as file:
            file.attrs["format"] = FORMAT
            file.attrs["version"] = FORMAT_VERSION
            file.attrs["conversion"] = conversion
            for split, parts in splits.items():
                sizes = [len(part.tables["bucket"]) for part in parts]
                tables = {
                    "file": np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
                    "place": np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
                }
                for name in (*TABLES_G, *TABLES_GB, OFFSETS):
                    tables[name] = np.concatenate([part.tables[name] for part in parts])
                _write_tables(file, split, tables)
        content = partial.read_bytes()
    return {"file": path.name, "bytes": len(content), "checksum": zlib.crc32(content)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with the same care. The manifest comes last, and says that the folder is complete."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_tables(file: h5py.File, node: str, tables: dict[str, np.ndarray]) -> None:
    for name, table in tables.items():
        file.create_dataset(f"{node}/{name}", data=table, track_times=False)


def _index_row(group: PaddedGroup) -> dict[str, Any]:
    return {
        "pass": group.pass_number,
        "bucket": group.bucket,
        "checksum": small_checksum(group.features_checksum, group.small),
        "max_label": group.small["labels"].max(),
        "id_bytes": group.small["trial_ids"].dtype.itemsize,
        "blocks": group.blocks_B,
        **{name: group.small[name] for name in TABLES_GB if name != "blocks"},
    }
