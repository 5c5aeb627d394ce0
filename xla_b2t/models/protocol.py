"""What the trainer asks of a decoder, whoever wrote it.

In: features of a batch of trials, their lengths and their days. Out: class scores for every output step, and how many
of those steps are real. Smoothing and noise are done before (`models/augment.py`), the loss after (`models/loss.py`).

A decoder may have auxiliary heads, trained on the same labels by the same loss. It may also have numbers that differ
from update to update, such as the strength of a regulariser: it says them on the host (`scheduled`) and gets them as a
tensor, so that a new value is an input of the graph and never a new graph.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from xla_b2t.data.groups import GroupSet
from xla_b2t.errors import UserError, line_of


@dataclass(frozen=True)
class Sizes:
    """What the data decides about a model."""

    num_features: int
    """C, values in a bin of 20 ms."""
    num_days: int
    """D, recording days; a trial's day is an index below it."""
    num_classes: int
    """K, class 0 is the CTC blank."""


def sizes_of(group_set: GroupSet) -> Sizes:
    """The sizes that a folder of groups has."""
    return Sizes(group_set.num_features, len(group_set.sessions), group_set.num_classes)


class AuxiliaryHead(NamedTuple):
    """Further class scores for the same labels: trained with the main ones, decoded only when asked for by name.

    Attributes:
        name: what `xla_b2t evaluate --head` calls it, distinct among the heads.
        logits_BPK: as the main ones, of the same shape; `steps_B` holds for them too.
        weight: of its CTC loss in the sum; a Python number, finite and not negative.
    """

    name: str
    logits_BPK: Tensor
    weight: float = 1.0


class DecoderOutput(NamedTuple):
    """What a decoder returns for a batch.

    Attributes:
        logits_BPK: class scores before the softmax, in the model's dtype; these are what it decodes.
        steps_B: int32, how many of the P steps belong to the trial: at least 1, at most P.
        auxiliary_loss_B: a loss of the model's own that needs no labels, float32, added to that of each trial; None for
            none.
        heads: auxiliary heads. Return them in evaluation too: what nobody reads of a lazy graph is never computed.
        weight: of the main CTC loss in the sum, as of a head. What changes from update to update is `scheduled`.
    """

    logits_BPK: Tensor
    steps_B: Tensor
    auxiliary_loss_B: Tensor | None = None
    heads: tuple[AuxiliaryHead, ...] = ()
    weight: float = 1.0


class Decoder(Protocol):
    """An `nn.Module` that keeps this protocol can be trained; `[model] factory = "file.py:function"` names its maker.

    A forward pass on a TPU core must not read a value back, index by a tensor in Python, or make a shape from a value.
    A decoder that has a method `scheduled` keeps `ScheduledDecoder`.
    """

    def forward(self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor) -> DecoderOutput:
        """Decodes a batch.

        Args:
            features_BTC: smoothed features in the model's dtype. Bins from `input_bins` on must not matter.
            input_bins_B: int32, real bins of each trial; 0 in an empty slot.
            days_B: int32, day of each trial, below `Sizes.num_days`; 0 in an empty slot.
        """
        ...

    def output_steps(self, input_bins: int) -> int:
        """Steps that come out for a trial of `input_bins` bins: on the host, the same rule as `steps_B`."""
        ...


class ScheduledDecoder(Decoder, Protocol):
    """A decoder with numbers that change from update to update."""

    def forward(
        self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor, scheduled_N: Tensor | None = None
    ) -> DecoderOutput:
        """As `Decoder.forward`; `scheduled_N` is float32, in training the numbers of this update, in evaluation None.

        A float32 vector times bfloat16 is float32: bring what you take from it to the model's dtype.
        """
        ...

    def scheduled(self, step: int) -> Sequence[float]:
        """The numbers of update `step` (from 0), equally many at each; of nothing else, so that resuming is exact."""
        ...


def scheduled_numbers(model: Decoder, step: int, count: int | None = None) -> list[Tensor]:
    """What `forward` takes after the days in update `step`: one float32 vector on the host, or nothing.

    Args:
        model: a decoder; what is not a method of it, such as a layer called `scheduled`, is no schedule.
        step: the update's number.
        count: how many numbers an earlier update had, None for the first.

    Raises:
        UserError: the model's `scheduled` fails, or gives something else than finite numbers, or more or fewer.
    """
    schedule = getattr(model, "scheduled", None)
    if not callable(schedule) or isinstance(schedule, nn.Module):
        return []
    where = f"scheduled of {type(model).__name__}"
    fix = "return one number for each thing that is scheduled, as many at every step"
    try:
        found = schedule(step)
    except UserError:
        raise
    except Exception as error:
        file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
        raise UserError(
            f"scheduled({step}) failed: {type(error).__name__}: {error}",
            line_of(error, Path(file)) if file else where,
            f"correct the line in {where}",
        ) from error
    try:
        values_N = np.asarray(found, np.float32)
    except (TypeError, ValueError):
        values_N = np.array(np.nan)
    if values_N.ndim != 1 or not np.isfinite(values_N).all():
        raise UserError(f"scheduled({step}) gave {found!r}, expected a sequence of finite numbers", where, fix)
    if count is not None and len(values_N) != count:
        raise UserError(f"scheduled({step}) gave {len(values_N)} numbers, at the updates before {count}", where, fix)
    return [torch.from_numpy(values_N)]


def checked(output: DecoderOutput, features_BTC: Tensor, num_classes: int, model: Decoder) -> DecoderOutput:
    """The output of a model, if its shapes, dtypes and weights are what the protocol asks for; values are not
    looked at.

    Raises:
        UserError: what was returned and what is expected, naming the model's class.
    """
    where = f"forward of {type(model).__name__}"
    fix = "return DecoderOutput(logits_BPK, steps_B) as xla_b2t/models/protocol.py describes it"
    if not isinstance(output, DecoderOutput):
        raise UserError(f"it returned {type(output).__name__}, expected DecoderOutput", where, fix)
    trials = features_BTC.shape[0]
    if not isinstance(output.steps_B, Tensor):
        raise UserError(f"steps_B is {type(output.steps_B).__name__}, expected a tensor", where, fix)
    _check_logits(output.logits_BPK, "logits", features_BTC, num_classes, model, fix)
    if tuple(output.steps_B.shape) != (trials,) or output.steps_B.dtype != torch.int32:
        found = f"steps are {output.steps_B.dtype} {tuple(output.steps_B.shape)}, expected torch.int32 ({trials},)"
        raise UserError(found, where, fix)
    loss_B = output.auxiliary_loss_B
    if loss_B is not None and not isinstance(loss_B, Tensor):
        raise UserError(f"the auxiliary loss is {type(loss_B).__name__}, expected a tensor or None", where, fix)
    if loss_B is not None and (tuple(loss_B.shape) != (trials,) or loss_B.dtype != torch.float32):
        found = f"the auxiliary loss is {loss_B.dtype} {tuple(loss_B.shape)}, expected torch.float32 ({trials},)"
        raise UserError(found, where, "give one loss a trial, with .float() where it is summed up")
    _check_weight(output.weight, "the main loss", where)
    fix = "return heads=(AuxiliaryHead(name, logits_BPK, weight),) as xla_b2t/models/protocol.py describes it"
    if not isinstance(output.heads, tuple | list):
        raise UserError(f"the heads are {type(output.heads).__name__}, expected a tuple", where, fix)
    for head in output.heads:
        if not isinstance(head, AuxiliaryHead):
            raise UserError(f"a head is {type(head).__name__}, expected AuxiliaryHead", where, fix)
        _check_logits(head.logits_BPK, f"logits of the head {head.name!r}", features_BTC, num_classes, model, fix)
        _check_weight(head.weight, f"the head {head.name!r}", where)
    names = [head.name for head in output.heads]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"the heads are called {names}, expected strings", where, fix)
    if len({"", *names}) <= len(names):
        raise UserError(f"the heads are called {names}", where, "give each head a name of its own")
    return output


def head_logits(output: DecoderOutput, name: str, model: Decoder) -> Tensor:
    """logits_BPK of the auxiliary head `name`, or the main ones for "".

    Raises:
        UserError: there is no such head; it lists those there are.
    """
    heads = {"": output.logits_BPK, **{head.name: head.logits_BPK for head in output.heads}}
    if name not in heads:
        known = ", ".join(head.name for head in output.heads)
        raise UserError(
            f"there is no auxiliary head {name!r}; known: {known or 'none'}",
            f"forward of {type(model).__name__}",
            f"use --head with one of {known}, or leave it away" if known else "leave --head away",
        )
    return heads[name]


def _check_weight(weight: float, what: str, where: str) -> None:
    """A tensor would be read from the core, or be of a wider dtype; NumPy's numbers take tensors for arrays."""
    if type(weight) not in (int, float) or not 0 <= weight < math.inf:
        found = weight if isinstance(weight, (int, float)) else f"a {type(weight).__name__}"
        raise UserError(
            f"the weight of {what} is {found}, expected a finite Python number from 0 up",
            where,
            "give a float; what changes while training goes through `scheduled` and the model's own loss",
        )


def _check_logits(logits: Tensor, what: str, features_BTC: Tensor, num_classes: int, model: Decoder, fix: str) -> None:
    trials, bins, _ = features_BTC.shape
    where = f"forward of {type(model).__name__}"
    if not isinstance(logits, Tensor):
        raise UserError(f"{what} are {type(logits).__name__}, expected a tensor", where, fix)
    if logits.dim() != 3 or (logits.shape[0], logits.shape[2]) != (trials, num_classes):
        raise UserError(f"{what} are {tuple(logits.shape)}, expected ({trials}, steps, {num_classes})", where, fix)
    if logits.dtype != features_BTC.dtype:
        found = f"{what} are {logits.dtype} for features in {features_BTC.dtype}"
        raise UserError(found, where, "keep the model's dtype: something in it is wider than its inputs")
    promised = model.output_steps(bins)
    if logits.shape[1] != promised:
        raise UserError(
            f"{bins} bins gave {what} of {logits.shape[1]} steps, output_steps({bins}) is {promised}",
            where,
            "make output_steps and forward follow one rule",
        )
