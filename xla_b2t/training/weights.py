"""Weights to decode with or to begin from, whoever trained them, brought to the sessions of other data.

In: a file, a run directory, or a folder of the published baseline. Out: a `Checkpoint`, days in the order that is asked
for, or a model that has its weights. Going on with a run, optimizer and all, is `checkpoint.load_file`.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.config import ModelConfig
from xla_b2t.data.groups import GroupSet
from xla_b2t.data.selection import columns_of
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_without_weights
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training import checkpoint as own
from xla_b2t.training import nejm
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder
from xla_b2t.training.step import TrainState
from xla_b2t.training.tensor_file import read_tensor_file

_OF_DAYS = re.compile(r"(^|\.)day_(weight|bias)$")
"""Parameters of our models that stack one layer a day along their first axis."""
_NAMED = 5
"""Names that an error lists; the rest are counted."""


def find_checkpoint(place: str | Path, which: str = "best") -> Path:
    """The file that is meant.

    Args:
        place: a run directory, or a folder of the published baseline.
        which: `best`, `latest`, or the path of a file, which need not lie there.

    Raises:
        UserError: there is no such folder, or no such checkpoint in it.
    """
    place = Path(place)
    if not place.is_dir():
        raise UserError("there is no such run directory", str(place), "give the directory that train wrote")
    if which not in ("best", "latest"):
        return Path(which)
    published = place / nejm.CHECKPOINT
    if not published.exists() or CheckpointFolder(place).exists():
        return CheckpointFolder(place).find(which)[0]
    if which == "latest":
        raise UserError("this is not a run directory: it holds a best checkpoint only", str(place), "leave latest away")
    return published


def weights_file(init_from: str) -> Path:
    """The file that `train.init_from` means: itself, or the best of a folder.

    Raises:
        UserError: a folder without a checkpoint.
    """
    place = Path(init_from)
    if not place.is_dir():
        return place
    if not CheckpointFolder(place).exists() and not (place / nejm.CHECKPOINT).exists():
        raise UserError(
            "there is no checkpoint in this folder",
            f"train.init_from: {place}",
            "give a run that train wrote, a file of its checkpoints/, or a folder of the published baseline",
        )
    return find_checkpoint(place)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint of ours, or of the published baseline; its tensors stay in the file until they are read.

    Raises:
        UserError: missing, damaged, of neither layout, or of a newer version.
    """
    values = read_tensor_file(path, mapped=True)
    if isinstance(values, dict) and nejm.STATE in values:
        return nejm.checkpoint_of(values, Path(path))
    return own.checkpoint_of(values, Path(path))


def for_sessions(checkpoint: Checkpoint, path: str, sessions: tuple[str, ...], where: str) -> Checkpoint:
    """The same decoder for data of these sessions: its day layers are picked by name, without their moments.

    Args:
        checkpoint: from `read_checkpoint`.
        path: its file, for errors.
        sessions: name of each day of the data, in the order of its day indices.
        where: the data, for errors.

    Raises:
        UserError: a session that it was not trained on; a user's own model and other sessions; a broken
            configuration in the checkpoint.
    """
    if sessions == checkpoint.sessions:
        return checkpoint
    if missing := [session for session in sessions if session not in checkpoint.sessions]:
        raise UserError(
            f"{len(missing)} of the {len(sessions)} sessions are unknown to the checkpoint: {_listed(missing)}; "
            f"it was trained on {len(checkpoint.sessions)}, {checkpoint.sessions[0]} to {checkpoint.sessions[-1]}",
            where,
            "give groups that were pre-batched from its sessions alone",
        )
    if factory := configuration.loads(checkpoint.config, path).model.factory:
        raise UserError(
            f"the groups have {len(sessions)} sessions, the checkpoint was trained on {len(checkpoint.sessions)}, in "
            f"an order of their own; which weights of {factory} belong to a session is not known",
            where,
            "give the groups that the run trained on",
        )
    days = torch.tensor([checkpoint.sessions.index(session) for session in sessions])

    def picked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[days] if _OF_DAYS.search(name) else tensor for name, tensor in tensors.items()}

    state = TrainState(picked(checkpoint.state.weights), {}, {}, picked(checkpoint.state.fixed))
    return replace(checkpoint, state=state, sessions=tuple(sessions))


def check_fits(model: nn.Module, checkpoint: Checkpoint, where: str) -> None:
    """Every parameter and buffer of the model, which may be without values, has one of the same shape, and no other.

    Raises:
        UserError: what is missing, what is too much, what has another shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = {name: tuple(t.shape) for name, t in (checkpoint.state.weights | checkpoint.state.fixed).items()}
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    wrong += [
        f"{name} is {found[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        raise UserError(
            f"the weights do not fit the model: {_listed(wrong)}",
            where,
            "give the checkpoint of such a model, or set [model.options] to those it was trained with",
        )


def check_use(checkpoint: Checkpoint, path: str, config: ModelConfig, group_set: GroupSet) -> None:
    """Whether a model for some data can have these weights; it is built without values, so this takes no time.

    Args:
        checkpoint: from `read_checkpoint`.
        path: its file, for errors.
        config: which model.
        group_set: the data.

    Raises:
        UserError: other features, a session that it lacks, a model that it is not of.
    """
    if group_set.num_features != checkpoint.num_features:
        raise UserError(
            f"the groups have {group_set.num_features} features, the checkpoint was trained on "
            f"{checkpoint.num_features}",
            group_set.folder,
            "give groups with the features that it was trained on",
        )
    theirs = configuration.loads(checkpoint.config, path).data.features
    if columns_of(theirs, group_set.stored_features) != group_set.columns:
        raise UserError(
            f"the checkpoint was trained on {', '.join(theirs) or 'all'} features, and other columns are read of these "
            "groups",
            f"{path}: data.features",
            f"set data.features={json.dumps(theirs)}",
        )
    sizes = sizes_of(group_set)
    model = build_without_weights(config, sizes)
    ordered = for_sessions(checkpoint, path, group_set.sessions, group_set.folder)
    try:
        check_fits(model, ordered, path)
    except UserError:
        _refuse_other_model(checkpoint, path, config)
        raise


def _refuse_other_model(checkpoint: Checkpoint, path: str, config: ModelConfig) -> None:
    """Weights that do not fit because the model is another: that says more than their names do."""
    theirs = configuration.loads(checkpoint.config, path).model
    names = [
        f"model.factory={model.factory}" if model.factory else f"model.name={model.name}" for model in (theirs, config)
    ]
    if names[0] != names[1]:
        raise UserError(
            f"the weights are of another model: {names[0]}, and this is {names[1]}",
            path,
            f"give the checkpoint of a model like this one, or --set {names[0]}",
        )


def start_from(model: nn.Module, path: str | Path, sessions: tuple[str, ...], data_dir: str) -> None:
    """Puts the weights of a file into a model on the CPU.

    Args:
        model: its values are replaced.
        path: a checkpoint of either layout.
        sessions: name of each of the model's days.
        data_dir: where the sessions are from, for errors.

    Raises:
        UserError: it cannot be read, lacks a session, or is of a model that this is not.
    """
    checkpoint = for_sessions(read_checkpoint(path), str(path), sessions, data_dir)
    check_fits(model, checkpoint, str(path))
    values = checkpoint.state.weights | checkpoint.state.fixed
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
