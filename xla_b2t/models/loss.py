"""The loss of a trial: the CTC losses of all heads of a decoder, weighted, and what it adds of its own.

In: what a decoder returned, and the labels. Out: one float32 loss a trial. Leaving empty slots out and summing is the
training step's affair.
"""

from torch import Tensor

from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.protocol import DecoderOutput


def trial_losses(output: DecoderOutput, labels_BL: Tensor, label_lengths_B: Tensor) -> Tensor:
    """The weighted sum.

    Args:
        output: of a decoder, checked.
        labels_BL, label_lengths_B: as in `models.ctc.ctc_loss`; the same for every head.

    Returns:
        loss_B, float32, in nats if all weights are 1.
    """
    loss_B = output.weight * ctc_loss(output.logits_BPK, labels_BL, output.steps_B, label_lengths_B)
    for head in output.heads:
        loss_B = loss_B + head.weight * ctc_loss(head.logits_BPK, labels_BL, output.steps_B, label_lengths_B)
    return loss_B if output.auxiliary_loss_B is None else loss_B + output.auxiliary_loss_B
