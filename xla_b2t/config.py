"""The configuration of a run: what a TOML file may say, its defaults, and where a mistake in it is.

In: a TOML file and `key=value` overrides. Out: a frozen `Config`. It is values only; nothing here knows torch.
The defaults are the published recipe for a participant of the public data set; `configs/` holds whole examples.
"""

import difflib
import re
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli
import tomli_w
from msgspec import Meta

from xla_b2t.config_words import LARGEST, expectation, find_value
from xla_b2t.errors import UserError

AtLeastOne = Annotated[int, Meta(ge=1)]
ZeroOrMore = Annotated[int, Meta(ge=0)]
NotNegative = Annotated[float, Meta(ge=0, lt=LARGEST)]
Positive = Annotated[float, Meta(gt=0, lt=LARGEST)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of the configuration."""


def _refuse_expression(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key} = {pattern!r} is not a regular expression: {error}") from None


class RunConfig(Record):
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs/latest"
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    cores: ZeroOrMore = 0
    """Ranks to train on; 0 takes every core of a TPU, and one rank on a CPU."""
    most_restarts: AtLeastOne = 5
    """Starts by `--resume auto` in a row that find no newer checkpoint; the next is refused."""


class DataConfig(Record):
    """Which groups are read, and in which order."""

    dir: str = "groups"
    num_features: ZeroOrMore = 0
    """Features that a bin must have as it is read; 0 takes what there are."""
    sessions: tuple[str, ...] = ()
    """Sessions to read, in names or globs such as "t15.2023.08.*"; empty for all. Days keep their numbers."""
    blocks: tuple[ZeroOrMore, ...] = ()
    """Blocks to read, of every session and split; empty for all."""
    features: tuple[str, ...] = ()
    """Features to read, by array ("ventral_6v", "area_4", "55b", "dorsal_6v") or columns ("0-63"); empty for all."""
    folds: ZeroOrMore = 0
    """Parts that the groups of `train` fall into, one of which takes the place of the split `val`; 0 for none."""
    fold: ZeroOrMore = 0
    """Which of them, from 0."""
    recipe: Literal["epochs", "days"] = "epochs"
    """`epochs`: each trial once an epoch. `days`: the published recipe, distinct days drawn with replacement."""
    days_per_batch: AtLeastOne = 4
    """Distinct days in one update under the recipe `days`."""
    prefetch_mb: AtLeastOne = 400
    """MB of batches kept ready on the host and, as many again, on the core: of the longest batch 1 to 8."""


class ModelConfig(Record):
    """Which decoder is trained."""

    name: str = "gru_decoder"
    factory: str = ""
    """A user's own model, `path/to/file.py:function`; it takes the place of `name`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    keep_float32: tuple[str, ...] = ()
    """Exceptions: parameters and buffers whose name one of these expressions finds stay in float32 on the core."""
    options: dict[str, Any] = {}
    """Handed to the model; each model checks its own names and types."""

    def __post_init__(self):
        for pattern in self.keep_float32:
            _refuse_expression("keep_float32", pattern)


class AugmentConfig(Record):
    """Noise put on the features of a training batch, and the smoothing of every batch.

    Units: z-scored features and bins.
    """

    white_noise_std: NotNegative = 1.0
    constant_offset_std: NotNegative = 0.2
    start_shift_bins: ZeroOrMore = 2
    """The largest number of bins dropped from a trial's start; each trial draws 0 to this many."""
    smooth_sigma_bins: NotNegative = 2.0
    """Width of the Gaussian smoothing over time; 0 is none. It is applied in evaluation too."""


class RateConfig(Record):
    """A learning rate: linear warm-up from 0 to `peak`, cosine down to `final` at `decay_steps`."""

    peak: NotNegative = 5e-3
    final: NotNegative = 1e-4
    warmup_steps: ZeroOrMore = 1000
    decay_steps: AtLeastOne = 120_000


class OptimizerConfig(Record):
    """AdamW. Days and biases have rules of their own, as in the published recipe."""

    rate: RateConfig = RateConfig()
    day_rate: RateConfig = RateConfig()
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: Positive = 0.1
    weight_decay: NotNegative = 1e-3
    day_weight_decay: NotNegative = 0.0
    bias_weight_decay: NotNegative = 0.0
    day_pattern: str = r"(^|\.)day_"
    """Parameters whose name this expression finds are day layers."""
    bias_pattern: str = r"(^|\.|_)bias"
    """Parameters whose name this expression finds are biases, unless they are day layers."""
    clip_norm: NotNegative = 10.0
    """Largest global norm of the gradient; 0 leaves it as it is."""
    sharded: bool = False
    """Each core holds its share of the float32 weights and moments, and not all of them: less memory, same numbers."""

    def __post_init__(self):
        _refuse_expression("day_pattern", self.day_pattern)
        _refuse_expression("bias_pattern", self.bias_pattern)


class TrainConfig(Record):
    """How long, and how much at a time."""

    steps: AtLeastOne = 120_000
    batch_size: ZeroOrMore = 0
    """Trials a core and micro-step, a multiple of the group size or a number that divides it; 0 follows from
    `global_batch`.

    Of the two, a file or an override that gives one alone means that one: the other becomes 0.
    """
    global_batch: ZeroOrMore = 64
    """Trials an update over all cores; 0 follows from `batch_size`."""
    accumulation: AtLeastOne = 1
    """Micro-steps an update."""
    log_every: AtLeastOne = 20
    """Updates between two readings of the loss."""
    checkpoint_every: AtLeastOne = 1000
    agreement_every: ZeroOrMore = 1000
    """Updates between two comparisons of all ranks' weights by checksum; 0 is none but at the start."""
    most_skipped_in_a_row: AtLeastOne = 10
    """An update whose loss or gradient is not finite is skipped; so many one after the other end the run."""
    init_from: str = ""
    """Weights to begin with in place of the seed's: a checkpoint file or a run directory (its best), of ours or in the
    layout of the published baseline. The optimizer begins anew, and days are matched by the names of sessions."""


class ValidationConfig(Record):
    """When the held-out split is decoded."""

    every: ZeroOrMore = 2000
    """Updates between two validations; 0 is none."""
    split: str = "val"
    batch_size: ZeroOrMore = 0
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
    tree = {} if path is None else _read(path)
    decode(Config, tree, str(path))
    _keep_one_batch(tree, tree)
    given: dict[str, Any] = {}
    for override in overrides:
        # One at a time, so that a mistake is blamed on the override that made it.
        _override(tree, given, override)
    _keep_one_batch(tree, given)
    return decode(Config, tree, "--set")


def dumps(config: Config) -> str:
    """The configuration as TOML; `load` reads it back equal."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def loads(text: str, where: str) -> Config:
    """Reads what `dumps` wrote, such as the configuration kept in a checkpoint.

    Args:
        text: TOML.
        where: the file it is from, for errors.

    Raises:
        UserError: as `load`.
    """
    try:
        return decode(Config, tomli.loads(text), where)
    except tomli.TOMLDecodeError as error:
        raise UserError(f"the configuration kept here is not TOML: {error}", where, "use another file") from None


def decode(record: type, tree: dict[str, Any], where: str, prefix: str = "") -> Any:
    """Turns a parsed tree into a record, strictly.

    Args:
        record: the msgspec type to make.
        tree: what the TOML parser returned.
        where: the file, for errors.
        prefix: dotted name of the table that `tree` is, for errors.

    Raises:
        UserError: names the file, the key, what was found, what was expected, and the nearest right key.
    """
    _refuse_unknown(record, tree, where, prefix)
    try:
        return msgspec.convert(tree, record)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        parts = re.findall(r"[^.\[\]`]+", path)
        key = ".".join(part for part in (prefix, *parts) if part)
        found = find_value(tree, parts)
        expected, example, near = expectation(record, parts, found)
        raise UserError(
            f"{key} is {found!r}, expected {expected}" if expected else message,
            f"{where}: {key}",
            near or (f"for example {key} = {example}" if example else "correct what is named"),
        ) from None


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomli.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the configuration cannot be read: {error.strerror}", str(path), "give --config a TOML file, or none"
        ) from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"this is not TOML: {error}", str(path), "correct the line that is named") from None


def _override(tree: dict[str, Any], given: dict[str, Any], override: str) -> None:
    """Puts one `key=value` into both trees and checks the first."""
    where = f"--set {override}"
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"{override!r} is not key=value", where, "write it as --set train.steps=100")
    text = text.strip()
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text
    if isinstance(value, date | time):
        value = text  # a folder may be called 2023-08-11
    _put(tree, parts, value, where)
    _put(given, parts, value, where)
    decode(Config, tree, where)


def _put(tree: dict[str, Any], parts: Sequence[str], value: Any, where: str) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise UserError(f"{part} is a value, not a table", where, "see the keys in the run's config.toml")
    tree[parts[-1]] = value


def _keep_one_batch(tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Where one of the two batch sizes was given alone, the other, given earlier or by default, follows from it."""
    sizes = {key: given.get("train", {}).get(key, 0) for key in ("batch_size", "global_batch")}
    named = [key for key, size in sizes.items() if size]
    if len(named) == 1:
        (follower,) = sizes.keys() - named
        tree["train"][follower] = 0


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
