"""What the trainer asks of a decoder, whoever wrote it.

In: features of a batch of trials, their lengths and their days. Out: class scores for every output step, and how many
of those steps are real. Smoothing and noise are done before (`models/augment.py`), the loss after (`models/ctc.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xla_b2t.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """What the data decides about a model."""

    num_features: int
    """C, values in a bin of 20 ms."""
    num_days: int
    """D, recording days; a trial's day is an index below it."""
    num_classes: int
    """K, class 0 is the CTC blank."""


class DecoderOutput(NamedTuple):
    """What a decoder returns for a batch.

    Attributes:
        logits_BPK: class scores before the softmax, in the model's dtype.
        steps_B: int32, how many of the P steps belong to the trial: at least 1, at most P.
        auxiliary_loss_B: a loss of the model's own, float32, added to the CTC loss of each trial; None for none.
    """

    logits_BPK: Tensor
    steps_B: Tensor
    auxiliary_loss_B: Tensor | None = None


class Decoder(Protocol):
    """An `nn.Module` that keeps this protocol can be trained; `[model] factory = "file.py:function"` names its maker.

    A forward pass on a TPU core must not read a value back, index by a tensor in Python, or make a shape from a value.
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


def checked(output: DecoderOutput, features_BTC: Tensor, num_classes: int, model: Decoder) -> DecoderOutput:
    """The output of a model, if its shapes and dtypes are what the protocol asks for; values are not looked at.

    Raises:
        UserError: what was returned and what is expected, naming the model's class.
    """
    trials, bins, _ = features_BTC.shape
    where = f"forward of {type(model).__name__}"
    fix = "return DecoderOutput(logits_BPK, steps_B) as xla_b2t/models/protocol.py describes it"
    if not isinstance(output, DecoderOutput):
        raise UserError(f"it returned {type(output).__name__}, expected DecoderOutput", where, fix)
    logits, steps = output.logits_BPK, output.steps_B
    if logits.dim() != 3 or (logits.shape[0], logits.shape[2]) != (trials, num_classes):
        raise UserError(f"logits are {tuple(logits.shape)}, expected ({trials}, steps, {num_classes})", where, fix)
    if logits.dtype != features_BTC.dtype:
        found = f"logits are {logits.dtype} for features in {features_BTC.dtype}"
        raise UserError(found, where, "keep the model's dtype: something in it is wider than its inputs")
    if tuple(steps.shape) != (trials,) or steps.dtype != torch.int32:
        found = f"steps are {steps.dtype} {tuple(steps.shape)}, expected torch.int32 ({trials},)"
        raise UserError(found, where, fix)
    promised = model.output_steps(bins)
    if logits.shape[1] != promised:
        raise UserError(
            f"{bins} bins gave logits of {logits.shape[1]} steps, output_steps({bins}) is {promised}",
            where,
            "make output_steps and forward follow one rule",
        )
    return output
