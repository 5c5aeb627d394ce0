"""The loss of a trial against the sum written out."""

import torch

from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.loss import trial_losses
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput

LABELS_BL, LENGTHS_B = torch.tensor([[1, 2], [3, 0]]).int(), torch.tensor([2, 1]).int()
STEPS_B = torch.tensor([6, 4]).int()


def scores(seed):
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed))


def ctc(logits_BPK):
    return ctc_loss(logits_BPK, LABELS_BL, STEPS_B, LENGTHS_B)


def test_trial_losses_of_one_head_are_its_ctc_loss():
    losses = trial_losses(DecoderOutput(scores(0), STEPS_B), LABELS_BL, LENGTHS_B)
    assert torch.equal(losses.objective_B, ctc(scores(0)))
    assert torch.equal(losses.main_B, ctc(scores(0)))


def test_trial_losses_of_several_heads_are_their_weighted_sum_and_the_models_own():
    own_B = torch.tensor([0.25, 7.0])
    heads = (AuxiliaryHead("a", scores(1), 0.3), AuxiliaryHead("b", scores(2), 2.0))
    output = DecoderOutput(scores(0), STEPS_B, own_B, heads, weight=0.5)
    expected = 0.5 * ctc(scores(0)) + 0.3 * ctc(scores(1)) + 2.0 * ctc(scores(2)) + own_B
    losses = trial_losses(output, LABELS_BL, LENGTHS_B)
    torch.testing.assert_close(losses.objective_B, expected, rtol=1e-6, atol=0)
    assert torch.equal(losses.main_B, ctc(scores(0))), "without weight: what validation measures"
