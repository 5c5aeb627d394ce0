"""Connectionist temporal classification: the loss of a label sequence without an alignment, inside the XLA graph.

Graves et al. 2006. In: class scores by step, labels, lengths. Out: one float32 loss a trial, with an analytic gradient.
`torch.nn.functional.ctc_loss` has no lowering for XLA: it would run on the host and cut the graph in two.

How it is laid out:
- A path is in a blank state (i labels are behind it) or in a label state (it is at label i). The two kinds are kept in
  two tables of equal width L + 1 instead of one interleaved row, so that a step needs one shift by one.
- The recursion backward in time is the forward one on labels and steps in reverse. Both are reversed as padded (a flip,
  no gather by length), and the end state, which then is somewhere inside, is where the recursion starts. So both run as
  one scan, stacked on the batch axis: half as many sequential steps.
- Occupancies of label states are enough: what is left of a step's probability is blank.
- Classes are picked by comparing and summing, K terms a label. A gather or scatter of single elements is slow on a TPU,
  and a matmul with a membership matrix would round float32 operands to bfloat16 there. XLA fuses the comparison into
  the sum and never stores it (PyTorch on plain CPU tensors does: P x B x L x K values for a moment).
"""

from typing import Any

import torch
from torch import Tensor

from xla_b2t.models.scalars import scalar_like
from xla_b2t.xla.scan import Tensors, scan

_IMPOSSIBLE = -1e30
"""Log-probability of what cannot be. Not -inf: a log-sum-exp of nothing but -inf has a NaN gradient."""


def ctc_loss(logits_BPK: Tensor, labels_BL: Tensor, steps_B: Tensor, label_lengths_B: Tensor) -> Tensor:
    """Negative log-probability of the labels, summed over all alignments; nothing is averaged.

    Args:
        logits_BPK: class scores before the softmax, any floating dtype; class 0 is the blank. The softmax and all that
            follows are float32, and the gradient comes back in the dtype of the logits.
        labels_BL: int32, 1 to K - 1, padded on the right with anything.
        steps_B: int32, 1 to P: real steps of each trial. Logits from there on do not matter and get a gradient of 0.
        label_lengths_B: int32, 0 to L: real labels of each trial.

    Returns:
        loss_B, float32. Labels that do not fit into the steps (a repeated label needs a blank in between) give a loss
        of about 1e30 and a gradient of 0: large enough to see, finite, and harmless to the rest of the batch.
    """
    return _Ctc.apply(logits_BPK, labels_BL, steps_B, label_lengths_B)


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BPK: Tensor, labels_BL: Tensor, steps_B: Tensor, label_lengths_B: Tensor) -> Tensor:
        log_probs_PBK = torch.log_softmax(logits_BPK.transpose(0, 1).float(), dim=2)
        steps, _, classes = log_probs_PBK.shape
        is_label_BLK = labels_BL.unsqueeze(2) == _count(classes, labels_BL)
        label_PBL = _where(is_label_BLK, log_probs_PBK.unsqueeze(2), 0.0).sum(dim=3)
        emission_PBM = torch.cat([log_probs_PBK[:, :, :1], label_PBL], dim=2)
        real_PB1 = (_count(steps, steps_B).unsqueeze(1) < steps_B).unsqueeze(2)
        place_M = _count(labels_BL.shape[1] + 1, labels_BL)
        length_B1 = label_lengths_B.unsqueeze(1)

        start_BM = (place_M == place_M[:1]).expand(labels_BL.shape[0], -1)
        if not ctx.needs_input_grad[0]:
            last, _ = _paths(start_BM, labels_BL, emission_PBM, real_PB1)
            return -_total(*last, place_M, length_B1)
        emission_back = torch.cat([emission_PBM[:, :, :1], label_PBL.flip(2)], dim=2).flip(0)
        (blank, label), before_PNL = _paths(
            torch.cat([start_BM, place_M + length_B1 == place_M[-1:]]),
            torch.cat([labels_BL, labels_BL.flip(1)]),
            torch.cat([emission_PBM, emission_back], dim=1),
            torch.cat([real_PB1, real_PB1.flip(0)], dim=1),
        )
        half = labels_BL.shape[0]
        total_B = _total(blank[:half], label[:half], place_M, length_B1)
        is_possible_B = total_B > scalar_like(_IMPOSSIBLE / 2, total_B)

        # A path is at a label with what led to it, the label itself, and what follows.
        at_label_PBL = before_PNL[:, :half] + label_PBL + before_PNL[:, half:].flip(0, 2)
        counts_PB1 = real_PB1 & is_possible_B.unsqueeze(1)
        occupancy_PBL = _where(counts_PB1, torch.exp(at_label_PBL - total_B.unsqueeze(1)), 0.0)
        by_class_PBK = _where(is_label_BLK, occupancy_PBL.unsqueeze(3), 0.0).sum(dim=2)
        blank_PB1 = 1.0 - occupancy_PBL.sum(dim=2, keepdim=True)
        expected_PBK = torch.cat([blank_PB1, by_class_PBK[:, :, 1:]], dim=2)
        ctx.save_for_backward(_where(counts_PB1, torch.exp(log_probs_PBK) - expected_PBK, 0.0))
        ctx.dtype = logits_BPK.dtype
        return -total_B

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, None, None, None]:
        (slope_PBK,) = ctx.saved_tensors
        return (slope_PBK * grad_B.unsqueeze(1)).transpose(0, 1).to(ctx.dtype), None, None, None


def _paths(start_NM: Tensor, labels_NL: Tensor, emission_PNM: Tensor, real_PN1: Tensor) -> tuple[Tensors, Tensor]:
    """Log-probability of all paths up to each state.

    Args:
        start_NM: the blank state a path begins in, before its first step.
        labels_NL: labels in the order of the path.
        emission_PNM: log-probability of the blank, then of each label, at each step in the order of the path.
        real_PN1: false where a step is padding; nothing changes there.

    Returns:
        (blank_NM, label_NL) after the last step; and before_PNL, the label states before the step's own emission.
    """
    nothing_NM = torch.full(start_NM.shape, _IMPOSSIBLE, dtype=emission_PNM.dtype, device=emission_PNM.device)
    zero_NM = torch.zeros_like(nothing_NM)
    is_no_repeat_N1 = torch.zeros_like(labels_NL[:, :1], dtype=torch.bool)
    is_repeat_NL = torch.cat([is_no_repeat_N1, labels_NL[:, 1:] == labels_NL[:, :-1]], dim=1)
    barrier_NL = torch.where(is_repeat_NL, nothing_NM[:, 1:], zero_NM[:, 1:])
    carry = (torch.where(start_NM, zero_NM, nothing_NM), nothing_NM[:, 1:])
    carry, (before_PNL,) = scan(_step, carry, (emission_PNM, real_PN1), (barrier_NL, nothing_NM[:, :1]))
    return carry, before_PNL


def _step(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    blank_NM, label_NL = carry
    emission_NM, real_N1 = x
    barrier_NL, nothing_N1 = constants
    # A blank is reached from itself and from the label before it; a label from itself, from the blank before it, and
    # from the label before that unless the two are the same.
    previous_NM = torch.cat([nothing_N1, label_NL], dim=1)
    to_blank_NM = _add(blank_NM, previous_NM)
    to_label_NL = _add(label_NL, blank_NM[:, :-1], previous_NM[:, :-1] + barrier_NL)
    blank_NM = torch.where(real_N1, to_blank_NM + emission_NM[:, :1], blank_NM)
    label_NL = torch.where(real_N1, to_label_NL + emission_NM[:, 1:], label_NL)
    return (blank_NM, label_NL), (to_label_NL,)


def _add(first: Tensor, *others: Tensor) -> Tensor:
    """Log of the sum of probabilities given as logarithms; `torch.logaddexp` has no lowering for XLA."""
    highest = first
    for other in others:
        highest = torch.maximum(highest, other)
    total = torch.exp(first - highest)
    for other in others:
        total = total + torch.exp(other - highest)
    return highest + torch.log(total)


def _total(blank_BM: Tensor, label_BL: Tensor, place_M: Tensor, length_B1: Tensor) -> Tensor:
    """Log-probability of the paths that end in the last label or in the blank behind it."""
    ends_in_blank = _where(place_M == length_B1, blank_BM, _IMPOSSIBLE)
    ends_in_label = _where(place_M[1:] == length_B1, label_BL, _IMPOSSIBLE)
    return torch.logsumexp(torch.cat([ends_in_blank, ends_in_label], dim=1), dim=1)


def _count(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=like.dtype, device=like.device)


def _where(condition: Tensor, value: Tensor, otherwise: float) -> Tensor:
    return torch.where(condition, value, scalar_like(otherwise, value))
