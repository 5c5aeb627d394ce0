"""The loss of a trial: the CTC losses of all heads of a decoder, weighted, and what it adds of its own.

In: what a decoder returned, and the labels. Out: what is minimised, and the one part of it that validation measures
too; float32, one of each a trial. Leaving empty slots out and summing is the
training step's affair.
"""

from typing import NamedTuple

from torch import Tensor

from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.protocol import DecoderOutput


class TrialLosses(NamedTuple):
    """Losses of a batch.

    Attributes:
        objective_B: the weighted sum, which is minimised, float32; in nats if all weights are 1.
        main_B: CTC loss of the main scores alone, without its weight, float32, in nats.
    """

    objective_B: Tensor
    main_B: Tensor


def trial_losses(output: DecoderOutput, labels_BL: Tensor, label_lengths_B: Tensor) -> TrialLosses:
    """The weighted sum, and its main part.

    Args:
        output: of a decoder, checked.
        labels_BL, label_lengths_B: as in `models.ctc.ctc_loss`; the same for every head.
    """
    main_B = ctc_loss(output.logits_BPK, labels_BL, output.steps_B, label_lengths_B)
    objective_B = output.weight * main_B
    for head in output.heads:
        head_B = ctc_loss(head.logits_BPK, labels_BL, output.steps_B, label_lengths_B)
        objective_B = objective_B + head.weight * head_B
    if output.auxiliary_loss_B is not None:
        objective_B = objective_B + output.auxiliary_loss_B
    return TrialLosses(objective_B, main_B)
