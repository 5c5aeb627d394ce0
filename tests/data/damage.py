"""What befalls files: ways to damage a source or a folder of groups, each drawn from a generator.

In: a folder. Out: the folder damaged, and what was done to it. `tests/data/test_damage.py` says what must become of it;
`benchmarks/damaged_data.py` asks thousands of times.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

Generator = np.random.Generator


def damage_source(folder: Path, rng: Generator) -> str:
    """Damages one session file in one way, and says how."""
    files = sorted(folder.rglob("*.hdf5"))
    path = files[rng.integers(len(files))]
    ways = [*_BYTES, *_TRIALS, *_FILES]
    way = ways[rng.integers(len(ways))]
    return f"{path.relative_to(folder)}: {way.__name__.strip('_')} {way(path, rng) or ''}".strip()


def damage_groups(folder: Path, rng: Generator) -> str:
    """Damages one file of a folder of groups in one way, and says how."""
    files = sorted(path for path in folder.iterdir() if path.name != "source.json")
    path = files[rng.integers(len(files))]
    ways = [*_BYTES, _remove, _swap] + ([_json] * 4 if path.suffix == ".json" else [_dataset, _attribute])
    way = ways[rng.integers(len(ways))]
    return f"{path.relative_to(folder)}: {way.__name__.strip('_')} {way(path, rng) or ''}".strip()


def _flip(path: Path, rng: Generator) -> str:
    """A few bits, as a bad disk or wire does it."""
    content = bytearray(path.read_bytes())
    places = rng.integers(len(content), size=int(rng.integers(1, 9)))
    for place in places:
        content[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)
    return f"at {sorted(map(int, places))}"


def _flip_early(path: Path, rng: Generator) -> str:
    """Where HDF5 keeps what it needs to find the rest."""
    content = bytearray(path.read_bytes())
    places = rng.integers(min(len(content), 4096), size=int(rng.integers(1, 17)))
    for place in places:
        content[place] = int(rng.integers(256))
    path.write_bytes(content)
    return f"at {sorted(map(int, places))}"


def _blank(path: Path, rng: Generator) -> str:
    """A page of zeros, as after a lost write."""
    content = bytearray(path.read_bytes())
    start = int(rng.integers(len(content)))
    end = min(len(content), start + 4096)
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    return f"from {start} to {end}"


def _truncate(path: Path, rng: Generator) -> str:
    length = int(rng.integers(path.stat().st_size))
    os.truncate(path, length)
    return f"to {length}"


def _lengthen(path: Path, rng: Generator) -> None:
    with open(path, "ab") as file:
        file.write(rng.bytes(int(rng.integers(1, 5000))))


_BYTES: list[Callable] = [_flip, _flip_early, _blank, _truncate, _lengthen]


def _empty(path: Path, _: Generator) -> None:
    path.write_bytes(b"")


def _text(path: Path, _: Generator) -> None:
    path.write_text("<html>404 not found</html>\n")


def _remove(path: Path, _: Generator) -> None:
    path.unlink()


def _folder(path: Path, _: Generator) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path, _: Generator) -> None:
    path.unlink()
    path.symlink_to("nowhere.hdf5")


def _no_trials(path: Path, _: Generator) -> None:
    with h5py.File(path, "w"):
        pass


def _swap(path: Path, rng: Generator) -> str:
    """Another file of the folder in its place."""
    others = [other for other in sorted(path.parent.iterdir()) if other != path and other.is_file()]
    if not others:
        return "with nothing"
    other = others[rng.integers(len(others))]
    path.write_bytes(other.read_bytes())
    return f"with {other.name}"


_FILES: list[Callable] = [_empty, _text, _remove, _folder, _dangling, _no_trials]


def _trial(file: h5py.File, rng: Generator) -> h5py.Group:
    names = sorted(file)
    return file[names[rng.integers(len(names))]]


def _missing_dataset(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        name = sorted(node)[rng.integers(len(node))]
        del node[name]
        return f"{node.name}/{name}"


def _missing_attribute(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        name = sorted(node.attrs)[rng.integers(len(node.attrs))]
        del node.attrs[name]
        return f"{node.name} {name}"


def _odd_attribute(path: Path, rng: Generator) -> str:
    odd = [
        np.nan, -1, 2**62, "forty", b"\xff\xfe", np.arange(5), np.array([]), np.bool_(True), 3.5, np.float32(12),
        h5py.Empty("i4"), np.array(["a", "b"], dtype=h5py.string_dtype()), np.array([(1, 2.0)], dtype="i4,f8"), 0,
    ]  # fmt: skip
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        name = sorted(node.attrs)[rng.integers(len(node.attrs))]
        value = odd[rng.integers(len(odd))]
        del node.attrs[name]
        node.attrs[name] = value
        return f"{node.name} {name} = {value!r}"


def _odd_dataset(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        name = sorted(node)[rng.integers(len(node))]
        del node[name]
        dtypes = ["f2", "f8", "i1", "u8", "c8", "S4", "i4,f8", "?", h5py.string_dtype(), h5py.ref_dtype]
        shapes = [(), (0,), (0, 0), (5,), (40, 0), (40, 8), (8, 40), (3, 4, 5), (40, 9)]
        dtype, shape = dtypes[rng.integers(len(dtypes))], shapes[rng.integers(len(shapes))]
        node.create_dataset(name, shape=shape, dtype=dtype)
        return f"{node.name}/{name} {shape} {dtype}"


def _wrong_numbers(path: Path, rng: Generator) -> str:
    """NaN, infinity or what no bfloat16 holds among the features; classes that are none."""
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        if rng.random() < 0.5 and "seq_class_ids" in node:
            value = [41, -1, 0, 2**31 - 1][rng.integers(4)]
            node["seq_class_ids"][int(rng.integers(8))] = value
            return f"{node.name}/seq_class_ids {value}"
        features = node["input_features"]
        value = [np.nan, np.inf, -np.inf, 3.4e38, 1e-45][rng.integers(5)]
        features[int(rng.integers(len(features))), int(rng.integers(features.shape[1]))] = value
        return f"{node.name}/input_features {value}"


def _huge_claim(path: Path, rng: Generator) -> str:
    """A shape that was never written, of terabytes and more."""
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        width = node["input_features"].shape[1]
        del node["input_features"]
        rows = int(10 ** rng.integers(4, 14))
        chunks = (16, width) if rng.random() < 0.5 else None
        node.create_dataset("input_features", (rows, width), "f4", chunks=chunks)
        node.attrs["n_time_steps"] = rows
        return f"{node.name} {rows} rows, chunks {chunks}"


def _never_written(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        shape = node["input_features"].shape
        del node["input_features"]
        node.create_dataset("input_features", shape, "f4", chunks=(16, shape[1]) if rng.random() < 0.5 else None)
        return node.name


def _odd_link(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        links = [
            h5py.SoftLink("/nowhere"), h5py.SoftLink(node.name), h5py.ExternalLink("other.hdf5", "/trial_0000"),
            h5py.SoftLink("/"),
        ]  # fmt: skip
        link = links[rng.integers(len(links))]
        name = ["input_features", "trial"][rng.integers(2)]
        if name == "trial":
            file["trial_9000"] = link
            return f"trial_9000 -> {link}"
        del node[name]
        node[name] = link
        return f"{node.name}/{name} -> {link}"


def _twice(path: Path, rng: Generator) -> str:
    """The same trial under two names: a hard link, or a copy."""
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        if rng.random() < 0.5:
            file["trial_9001"] = node
        else:
            file.copy(node, "trial_9001")
        return node.name


def _odd_name(path: Path, rng: Generator) -> str:
    names = [b"trial_\xff\xfe", b"trial_", "trial_ä".encode(), b"notes", b"trial_" + b"9" * 300]
    name = names[rng.integers(len(names))]
    with h5py.File(path, "r+") as file:
        node = _trial(file, rng)
        file.id.links.move(node.name.encode(), file.id, name)
        return repr(name)


_TRIALS: list[Callable] = [
    _missing_dataset, _missing_attribute, _odd_attribute, _odd_attribute, _odd_dataset, _odd_dataset, _wrong_numbers,
    _huge_claim, _never_written, _odd_link, _twice, _odd_name,
]  # fmt: skip


def _json(path: Path, rng: Generator) -> str:
    """One value of the manifest, at any depth, in another's place."""
    tree = json.loads(path.read_text())
    node, way = tree, []
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        way.append(key)
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            break
        node = inner
    odd = [None, -1, 10**12, "x", "../../etc/passwd", [], {}, [1], {"a": 1}, 1.5, True, 99]
    if rng.random() < 0.2:
        del node[key]
        said = "gone"
    else:
        node[key] = odd[rng.integers(len(odd))]
        said = repr(node[key])
    path.write_text(json.dumps(tree))
    return f"{'.'.join(map(str, way))} = {said}"


def _nodes(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda name, node: found.append(name) if isinstance(node, h5py.Dataset) else None)
    return found


def _dataset(path: Path, rng: Generator) -> str:
    """A dataset of a file of groups, gone, of another shape or type, or with other numbers."""
    with h5py.File(path, "r+") as file:
        names = _nodes(file)
        name = names[rng.integers(len(names))]
        stored = file[name]
        way = rng.integers(4)
        if way == 0:
            del file[name]
            return f"{name} gone"
        shape, dtype = stored.shape, stored.dtype
        if way == 1 and stored.size:
            with contextlib.suppress(TypeError):
                value = stored[()]
                place = tuple(int(rng.integers(size)) for size in shape)
                value[place] = [0, 1, 99, 255][rng.integers(4)]
                stored[()] = value
                return f"{name}{place} = {value[place]}"
        del file[name]
        if way == 2:
            file.create_dataset(name, data=np.zeros((*shape[:-1], shape[-1] + 1), dtype))
            return f"{name} {shape} + 1"
        file.create_dataset(name, data=np.zeros(shape, "f4"))
        return f"{name} f4"


def _attribute(path: Path, rng: Generator) -> str:
    with h5py.File(path, "r+") as file:
        names = sorted(file.attrs)
        if not names:
            return "none"
        name = names[rng.integers(len(names))]
        if rng.random() < 0.5:
            del file.attrs[name]
            return f"{name} gone"
        odd = [0, 99, "x", np.arange(3), b"\xff", 3.5, h5py.Empty("i4")]
        value = odd[rng.integers(len(odd))]
        del file.attrs[name]
        file.attrs[name] = value
        return f"{name} = {value!r}"
