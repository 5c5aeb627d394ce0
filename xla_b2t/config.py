"""The configuration of a run: what a TOML file may say, its defaults, and where a mistake in it is.

In: a TOML file and `key=value` overrides. Out: a frozen `Config`. It is values only; nothing here knows torch.
The defaults are the published recipe for a participant of the public data set; `configs/` holds whole examples.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli
import tomli_w

from xla_b2t.errors import UserError


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of the configuration."""


class RunConfig(Record):
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs/latest"
    seed: int = 0
    cores: int = 0
    """Ranks to train on; 0 takes every core of a TPU, and one rank on a CPU."""


class DataConfig(Record):
    """Which groups are read, and in which order."""

    dir: str = "groups"
    recipe: Literal["epochs", "days"] = "epochs"
    """`epochs`: each group once an epoch. `days`: the published recipe, distinct days drawn with replacement."""
    days_per_batch: int = 4
    """Distinct days in one update under the recipe `days`."""
    prefetch_batches: int = 2
    """Batches kept ready on the host and, as many again, on the core."""


class ModelConfig(Record):
    """Which decoder is trained."""

    name: str = "gru_decoder"
    factory: str = ""
    """A user's own model, `path/to/file.py:function`; it takes the place of `name`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    options: dict[str, Any] = {}
    """Handed to the model; each model checks its own names and types."""


class AugmentConfig(Record):
    """Noise put on the features of a training batch, and the smoothing of every batch.

    Units: z-scored features and bins.
    """

    white_noise_std: float = 1.0
    constant_offset_std: float = 0.2
    start_shift_bins: int = 2
    """The largest number of bins dropped from a trial's start; each trial draws 0 to this many."""
    smooth_sigma_bins: float = 2.0
    """Width of the Gaussian smoothing over time; 0 is none. It is applied in evaluation too."""


class RateConfig(Record):
    """A learning rate: linear warm-up from 0 to `peak`, cosine down to `final` at `decay_steps`."""

    peak: float = 5e-3
    final: float = 1e-4
    warmup_steps: int = 1000
    decay_steps: int = 120_000


class OptimizerConfig(Record):
    """AdamW. Days and biases have rules of their own, as in the published recipe."""

    rate: RateConfig = RateConfig()
    day_rate: RateConfig = RateConfig()
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 0.1
    weight_decay: float = 1e-3
    day_weight_decay: float = 0.0
    bias_weight_decay: float = 0.0
    day_pattern: str = r"(^|\.)day_"
    """Parameters whose name this expression finds are day layers."""
    bias_pattern: str = r"(^|\.|_)bias"
    """Parameters whose name this expression finds are biases, unless they are day layers."""
    clip_norm: float = 10.0
    """Largest global norm of the gradient; 0 leaves it as it is."""


class TrainConfig(Record):
    """How long, and how much at a time."""

    steps: int = 120_000
    batch_size: int = 0
    """Trials a core and micro-step, a multiple of the group size; 0 follows from `global_batch`."""
    global_batch: int = 64
    """Trials an update over all cores; 0 follows from `batch_size`."""
    accumulation: int = 1
    """Micro-steps an update."""
    log_every: int = 20
    """Updates between two readings of the loss."""
    checkpoint_every: int = 1000


class ValidationConfig(Record):
    """When the held-out split is decoded."""

    every: int = 2000
    split: str = "val"
    batch_size: int = 0
    """Trials a core and step; 0 is the training batch size."""


class Config(Record):
    """A whole run."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    augment: AugmentConfig = AugmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and applies `key=value` overrides, the later the stronger.

    Args:
        path: a TOML file; None takes the defaults alone.
        overrides: each `table.key=value`, the value in TOML; a bare word is taken as a string.

    Raises:
        UserError: no such file, not TOML, an unknown key, a value of the wrong type or out of range.
    """
    tree: dict[str, Any] = {}
    where = "defaults"
    if path is not None:
        where = str(path)
        try:
            tree = tomli.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"the configuration cannot be read: {error.strerror}", where, "give --config a TOML file, or none"
            ) from None
        except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"this is not TOML: {error}", where, "correct the line that is named") from None
    for override in overrides:
        _set(tree, override)
        where = (
            f"{path or 'defaults'} with --set {override}" if len(overrides) == 1 else f"{path or 'defaults'} with --set"
        )
    return decode(Config, tree, where)


def dumps(config: Config) -> str:
    """The configuration as TOML; `load` reads it back equal."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def decode(record: type, tree: dict[str, Any], where: str, prefix: str = "") -> Any:
    """Turns a parsed tree into a record, strictly.

    Args:
        record: the msgspec type to make.
        tree: what the TOML parser returned.
        where: the file, for errors.
        prefix: dotted name of the table that `tree` is, for errors.

    Raises:
        UserError: names the file, the key, what was found, and the nearest right key.
    """
    _refuse_unknown(record, tree, where, prefix)
    try:
        return msgspec.convert(tree, record)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = ".".join(part for part in (prefix, path.strip("`").lstrip(".")) if part)
        found = _look_up(tree, path.strip("`").lstrip("."))
        raise UserError(
            f"{message}; found {found!r}", f"{where}: {key}", f"give {key} a value of the type that was expected"
        ) from None


def _refuse_unknown(record: type, tree: Any, where: str, prefix: str) -> None:
    if not isinstance(tree, dict) or not (isinstance(record, type) and issubclass(record, msgspec.Struct)):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(record)}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if key in fields:
            _refuse_unknown(fields[key], value, where, name)
            continue
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        nearest = f"{prefix}.{near[0]}" if prefix and near else near[0] if near else ""
        fix = f"did you mean {nearest}?" if nearest else "the keys here are " + ", ".join(sorted(fields))
        raise UserError(f"unknown key {name}", f"{where}: {name}", fix)


def _look_up(tree: Any, dotted: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", dotted):
        tree = tree[part] if isinstance(tree, dict) and part in tree else tree
    return tree


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"{override!r} is not key=value", f"--set {override}", "write it as --set train.steps=100")
    try:
        value = tomli.loads(f"value = {text.strip()}")["value"]
    except tomli.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise UserError(f"{part} is a value, not a table", f"--set {override}", "see the keys in configs/")
    tree[parts[-1]] = value
