"""Checkpoints: whole, checked, and never harmed by the next one.

`checkpoints/step-N.pt` holds plain CPU tensors and values, loadable by `torch.load(weights_only=True)` without
torch_xla. `checkpoints/manifest.json` is written last and says which file is the latest, which is the best, and what
each must hash to. Both are written under a temporary name, flushed to disk and renamed.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from xla_b2t.errors import UserError
from xla_b2t.files import replacing
from xla_b2t.training.step import TrainState
from xla_b2t.training.tensor_file import read_tensor_file

FORMAT = "xla_b2t.checkpoint"
VERSION = 1
_NUM_KEPT = 2
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A run at the end of an update.

    Attributes:
        step: updates done.
        state: weights, moments and buffers.
        config: the run's configuration in TOML.
        conversion: which groups it trained on.
        global_batch: trials an update.
        sessions: name of each day, in the order of the day indices.
        num_features: C.
        num_classes: K.
        val_per: phoneme error rate at this step, if it was validated here.
        course: how the run went so far, for a resumed run to go on from: error rates and losses, by name.
    """

    step: int
    state: TrainState
    config: str
    conversion: str
    global_batch: int
    sessions: tuple[str, ...]
    num_features: int
    num_classes: int
    val_per: float | None = None
    course: dict[str, Any] = field(default_factory=dict)


class CheckpointFolder:
    """The checkpoints of one run; rank 0 alone writes."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / "checkpoints"

    def save(self, checkpoint: Checkpoint, is_best: bool) -> Path:
        """Writes a checkpoint, makes it the latest (and the best), and removes what neither name needs.

        Raises:
            UserError: the disk does not take it; what was there before is as it was.
        """
        name = f"step-{checkpoint.step:08d}.pt"
        manifest = self._manifest() or {"format": FORMAT, "version": VERSION, "best": None, "files": {}}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            values = {**vars(checkpoint), "state": vars(checkpoint.state), "sessions": list(checkpoint.sessions)}
            with replacing(self.path / name) as path:
                with open(path, "wb") as file:
                    torch.save({"format": FORMAT, "version": VERSION, **values}, file)
                digest = _digest(path)
            # After a fall-back past damaged files, what lies ahead of this step belongs to a course that was given up.
            manifest["files"] = {
                other: entry for other, entry in manifest["files"].items() if entry["step"] < checkpoint.step
            }
            if manifest["best"] not in manifest["files"]:
                manifest["best"] = None
            manifest["files"][name] = {"step": checkpoint.step, "sha256": digest, "val_per": checkpoint.val_per}
            manifest |= {"latest": name, "conversion": checkpoint.conversion, "global_batch": checkpoint.global_batch}
            manifest["best"] = name if is_best else manifest["best"]
            newest = sorted(manifest["files"])[-_NUM_KEPT:]
            dropped = [other for other in manifest["files"] if other not in newest and other != manifest["best"]]
            for other in dropped:
                del manifest["files"][other]
            with replacing(self.path / "manifest.json") as path:
                path.write_text(json.dumps(manifest, indent=1))
            for path in self.path.glob("step-*.pt*"):
                if path.name not in manifest["files"]:
                    path.unlink()
        except (OSError, RuntimeError) as error:
            fix = "free some space there, then go on from the checkpoint before with --resume"
            raise disk_error(error, str(self.path), fix) from error
        return self.path / name

    def find(self, which: str) -> tuple[Path, int]:
        """The file of `latest` or `best` and its step; where a latest is damaged, the newest before it that is whole.

        Raises:
            UserError: there is none, or none that is whole.
        """
        manifest = self._manifest()
        if manifest is None or not manifest["files"]:
            raise UserError(
                "there is no checkpoint yet", str(self.path), "give the directory of a run that has saved one"
            )
        newest = sorted(manifest["files"], reverse=True)
        names = [manifest["best"] or manifest["latest"]] if which == "best" else newest
        damaged = []
        for name in names:
            path = self.path / name
            if path.exists() and _digest(path) == manifest["files"][name]["sha256"]:
                if damaged:
                    _LOG.warning("%s is damaged or missing; going on from %s", ", ".join(damaged), name)
                return path, manifest["files"][name]["step"]
            damaged.append(name)
        raise UserError(
            f"no checkpoint is whole: {', '.join(damaged)}", str(self.path), "resume from a copy, or train anew"
        )

    def exists(self) -> bool:
        """True when there is a manifest, so something to resume from."""
        return (self.path / "manifest.json").exists()

    def trained_on(self) -> tuple[str, int]:
        """The conversion of the groups, and the trials an update, of the latest checkpoint; there must be one."""
        manifest = self._manifest()
        return manifest["conversion"], manifest["global_batch"]

    def latest_step(self) -> int:
        """Updates done in the latest checkpoint; there must be one."""
        manifest = self._manifest()
        return manifest["files"][manifest["latest"]]["step"]

    def _manifest(self) -> dict[str, Any] | None:
        path = self.path / "manifest.json"
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_text())
            version = manifest["version"]
            manifest["files"], manifest["latest"], manifest["best"]
        except (ValueError, KeyError, OSError) as error:
            raise UserError(
                f"the manifest cannot be read: {error}", str(path), "give the checkpoint file itself to --checkpoint"
            ) from None
        if version > VERSION:
            raise UserError(
                f"checkpoints of version {version}, this program reads up to {VERSION}", str(path), "upgrade xla_b2t"
            )
        return manifest


def load_file(path: str | Path) -> Checkpoint:
    """Reads one checkpoint file.

    Weights and moments stay in the file until they are read: ranks on one host share its pages, and one that holds a
    part of the moments reads little more. Frozen parameters and buffers, which a run keeps to its end, are read, so
    that the file is let go with the rest. It may be replaced or removed meanwhile, as `CheckpointFolder` does.

    Raises:
        UserError: missing, damaged, not ours, or of a newer version.
    """
    checkpoint = checkpoint_of(read_tensor_file(path, mapped=True), Path(path))
    fixed = {name: tensor.clone() for name, tensor in checkpoint.state.fixed.items()}
    return replace(checkpoint, state=replace(checkpoint.state, fixed=fixed))


def checkpoint_of(values: Any, path: Path) -> Checkpoint:
    """The checkpoint that a file's values are; errors as of `load_file`."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{path.name} is not a checkpoint of xla_b2t", str(path), "give a file of checkpoints/")
    version = values.get("version")
    if not isinstance(version, int):
        raise UserError(f"{path.name} is not a whole checkpoint: it has no version", str(path), "use another")
    if version > VERSION:
        raise UserError(
            f"checkpoint version {version}, this program reads up to {VERSION}", str(path), "upgrade xla_b2t"
        )
    try:
        return msgspec.convert(values, Checkpoint)
    except msgspec.ValidationError as error:
        raise UserError(f"{path.name} is not a whole checkpoint: {error}", str(path), "use another") from None


def disk_error(error: Exception, where: str, fix: str) -> UserError:
    """What to tell when a checkpoint could not be written."""
    # torch's writer turns a full disk into a RuntimeError that says nothing; the reason is what it met first.
    reason = error.__context__ if isinstance(error.__context__, OSError) else error
    return UserError(f"the checkpoint cannot be written: {getattr(reason, 'strerror', None) or reason}", where, fix)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest_310(file)


def _digest_310(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
