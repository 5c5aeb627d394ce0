"""Whether a run may go on: under another configuration, on other data, from the state that its checkpoint holds.

A resumed run is to equal the uninterrupted one, so what the weights and the order of trials depend on must not change.
The number of cores may, as long as the global batch stays: the schedule deals the same groups. So may how the state
is spread over them, whether our own models run the TPU's kernels, which compute the same, and what a run began with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.audit.findings import Finding, finding_of
from xla_b2t.config import Config
from xla_b2t.data.groups import GroupSet
from xla_b2t.errors import UserError
from xla_b2t.models.build import with_all_options
from xla_b2t.training.checkpoint import Checkpoint, checkpoint_of
from xla_b2t.training.tensor_file import read_tensor_file

MAY_CHANGE = (
    "run.dir", "run.cores", "run.most_restarts", "data.dir", "data.num_features", "data.prefetch_mb",
    "optimizer.sharded", "train.steps", "train.batch_size", "train.global_batch", "train.accumulation",
    "train.log_every", "train.checkpoint_every", "train.agreement_every", "train.most_skipped_in_a_row",
    "train.init_from", "validation.every", "validation.split", "validation.batch_size",
)  # fmt: skip
KERNEL = "model.options.kernel"
"""May change too, but for a user's own model, whose options mean what it likes."""
_NAMED = 3
"""Names that a finding gives; the rest are counted."""
_OTHER_RUN = "begin another run with --set run.dir="


@dataclass(frozen=True)
class Resumed:
    """The run that is gone on with.

    Attributes:
        config_path: its `config.toml`.
        conversion: which groups it trained on.
        global_batch: trials of an update.
        checkpoint: the file whose state is gone on from; "" leaves the state unchecked.
    """

    config_path: str
    conversion: str
    global_batch: int
    checkpoint: str = ""


def changed_keys(before_path: str, config: Config) -> list[Finding]:
    """A finding for every key whose change would make another run of it.

    Args:
        before_path: `config.toml` of the run.
        config: what it is to go on with.

    Raises:
        UserError: the file cannot be read, or one of the two has options that its model does not take.
    """
    before = _flat(msgspec.to_builtins(with_all_options(configuration.load(before_path))))
    now = _flat(msgspec.to_builtins(with_all_options(config)))
    may_change = MAY_CHANGE if config.model.factory else (*MAY_CHANGE, KERNEL)
    return [
        Finding(
            "resume",
            key,
            before_path,
            repr(now.get(key)),
            f"{before.get(key)!r}, with which this run began",
            f"leave {key} as it was, or {_OTHER_RUN}",
        )
        for key in sorted(before.keys() | now.keys())
        if key not in may_change and before.get(key) != now.get(key)
    ]


def changed_data(before: Resumed, conversion: str, data_dir: str) -> list[Finding]:
    """A finding when the groups are not those that the run began with."""
    if before.conversion == conversion:
        return []
    return [
        Finding(
            "resume",
            "data.dir",
            data_dir,
            f"groups of the conversion {conversion}",
            f"{before.conversion}, with which this run began",
            "give the groups that the run began with: --set data.dir=",
        )
    ]


def changed_batch(before: Resumed, global_batch: int) -> list[Finding]:
    """A finding when an update has not as many trials as the run began with."""
    if before.global_batch == global_batch:
        return []
    return [
        Finding(
            "resume",
            "trials an update",
            before.config_path,
            str(global_batch),
            f"{before.global_batch}, with which this run began",
            f"set train.global_batch={before.global_batch}, or a batch size, accumulation and cores that give it",
        )
    ]


def state(path: str, group_set: GroupSet, model: nn.Module | None) -> list[Finding]:
    """What the state of a checkpoint is that this run could not go on from; its tensors stay in the file.

    Args:
        path: the checkpoint.
        group_set: the data; features, days and classes must be those that the checkpoint was trained on.
        model: what is to go on, with or without values; None where that is not known, or is another model by its
            configuration: then its parameters are not compared.
    """
    try:
        checkpoint = checkpoint_of(read_tensor_file(path, mapped=True), Path(path))
    except UserError as error:
        return [finding_of(error, "resume")]
    sizes = _sizes(checkpoint, path, group_set)
    # Parameters of another shape follow from other sizes, and say less.
    parameters = _parameters(checkpoint, path, model) if model and not sizes else []
    return [*sizes, *parameters, *_moments(checkpoint, path), *_dtypes(checkpoint, path)]


def _sizes(checkpoint: Checkpoint, path: str, group_set: GroupSet) -> list[Finding]:
    fix = f"give the groups that the run began with: --set data.dir=, or {_OTHER_RUN}"
    found = [
        Finding("resume", name, path, f"{of_data} in the groups", f"{of_run}, on which this run was trained", fix)
        for name, of_data, of_run in (
            ("features", group_set.num_features, checkpoint.num_features),
            ("classes", group_set.num_classes, checkpoint.num_classes),
        )
        if of_data != of_run
    ]
    if group_set.sessions != checkpoint.sessions:
        days = [*zip(group_set.sessions, checkpoint.sessions, strict=False)]
        day = next((day for day, (ours, theirs) in enumerate(days) if ours != theirs), len(days))
        here, there = (
            f"{len(of)} sessions, day {day} {_nth(of, day)}" for of in (group_set.sessions, checkpoint.sessions)
        )
        found.append(Finding("resume", "days", path, f"{here} in the groups", f"{there}, on which it was trained", fix))
    return found


def _nth(sessions: tuple[str, ...], day: int) -> str:
    return f"is {sessions[day]}" if day < len(sessions) else "is none"


def _parameters(checkpoint: Checkpoint, path: str, model: nn.Module) -> list[Finding]:
    """Every tensor of the state has its place in the model, and none of the model's is left without."""
    wanted = {
        name: ("trained" if tensor.requires_grad else "fixed", tensor) for name, tensor in model.named_parameters()
    }
    wanted |= {name: ("fixed", tensor) for name, tensor in model.named_buffers()}
    held = {name: ("trained", tensor) for name, tensor in checkpoint.state.weights.items()}
    held |= {name: ("fixed", tensor) for name, tensor in checkpoint.state.fixed.items()}
    both = [name for name in wanted if name in held]
    fix = f"give the model that the run began with, or {_OTHER_RUN}"

    def finding(names: list[str], found: Callable[[str], str], expected: Callable[[str], str]) -> list[Finding]:
        return [Finding("resume", _named(names), path, found(names[0]), expected(names[0]), fix)] if names else []

    return [
        *finding(
            [name for name in wanted if name not in held],
            lambda name: "nothing in the checkpoint",
            lambda name: f"{_shape(wanted[name][1])}, as in the model",
        ),
        *finding(
            [name for name in held if name not in wanted],
            lambda name: f"{_shape(held[name][1])} in the checkpoint",
            lambda name: "nothing, as in the model",
        ),
        *finding(
            [name for name in both if _shape(held[name][1]) != _shape(wanted[name][1])],
            lambda name: f"{_shape(held[name][1])} in the checkpoint",
            lambda name: f"{_shape(wanted[name][1])}, as in the model",
        ),
        *finding(
            [name for name in both if held[name][0] != wanted[name][0]],
            lambda name: f"{held[name][0]} in the checkpoint",
            lambda name: f"{wanted[name][0]}, as in the model",
        ),
    ]


def _moments(checkpoint: Checkpoint, path: str) -> list[Finding]:
    """Every master has its two moments."""
    found = []
    for column in ("moment1", "moment2"):
        moments = getattr(checkpoint.state, column)
        odd = [name for name, weight in checkpoint.state.weights.items() if _shape(moments.get(name)) != _shape(weight)]
        if odd:
            here = "nothing" if odd[0] not in moments else str(_shape(moments[odd[0]]))
            there = str(_shape(checkpoint.state.weights[odd[0]]))
            found.append(Finding("resume", f"{column} of {_named(odd)}", path, here, there, _anew(path)))
    return found


def _dtypes(checkpoint: Checkpoint, path: str) -> list[Finding]:
    """Masters and moments are float32: in bfloat16 most updates are smaller than a weight's last bit, and are lost."""
    found: dict[tuple[str, torch.dtype], list[str]] = {}
    for column, what in (("weights", "master"), ("moment1", "moment1"), ("moment2", "moment2")):
        for name, tensor in getattr(checkpoint.state, column).items():
            if tensor.dtype != torch.float32:
                found.setdefault((what, tensor.dtype), []).append(name)
    return [
        Finding(
            "resume",
            f"{what} of {_named(names)}",
            path,
            str(dtype).removeprefix("torch."),
            "float32",
            _anew(path),
        )
        for (what, dtype), names in found.items()
    ]


def _anew(path: str) -> str:
    return f"go on from a checkpoint as train wrote it, or begin a run with these weights: --set train.init_from={path}"


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _named(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
