"""What the trainer asks of a decoder, whoever wrote it.

In: features of a batch of trials, their lengths and their days. Out: class scores for every output step, and how many
of those steps are real. Smoothing and noise are done before (`models/augment.py`), the loss after (`models/ctc.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


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
