"""The CTC loss against PyTorch's own, in value and gradient, on plain tensors and in an XLA graph."""

import pytest
import torch
import torch.nn.functional as F

from xla_b2t.models.ctc import ctc_loss


def expected(logits_BPK, labels_BL, steps_B, lengths_B, weight_B):
    """Value and gradient by PyTorch, in float64."""
    leaf = logits_BPK.double().requires_grad_()
    log_probs = leaf.log_softmax(2).transpose(0, 1)
    loss_B = F.ctc_loss(log_probs, labels_BL.long(), steps_B.long(), lengths_B.long(), reduction="none")
    (gradient,) = torch.autograd.grad((loss_B * weight_B).sum(), leaf)
    return loss_B.detach(), gradient


def found(logits_BPK, labels_BL, steps_B, lengths_B, weight_B):
    leaf = logits_BPK.detach().requires_grad_()
    loss_B = ctc_loss(leaf, labels_BL, steps_B, lengths_B)
    (gradient,) = torch.autograd.grad((loss_B * weight_B).sum(), leaf)
    return loss_B, gradient


def as_batch(cases, seed=0, scale=2.0, classes=7):
    """Cases of (labels, steps): logits, labels, steps, lengths, weights; padded with what must not matter."""
    generator = torch.Generator().manual_seed(seed)
    slots, longest = max(1, *(len(labels) for labels, _ in cases)), max(steps for _, steps in cases)
    logits = torch.randn(len(cases), longest, classes, generator=generator) * scale
    labels = torch.randint(0, classes, (len(cases), slots), generator=generator, dtype=torch.int32)
    for row, (target, _) in enumerate(cases):
        labels[row, : len(target)] = torch.tensor(target, dtype=torch.int32)
    steps = torch.tensor([steps for _, steps in cases], dtype=torch.int32)
    lengths = torch.tensor([len(target) for target, _ in cases], dtype=torch.int32)
    return logits, labels, steps, lengths, torch.rand(len(cases), generator=generator) + 0.5


HARD_CASES = {
    "repeats": ([3, 3, 3, 2, 2], 20),
    "as long as allowed": ([1, 2, 3, 4, 5], 5),
    "as long as allowed with repeats": ([4, 4, 1, 1, 1, 2], 9),
    "one to spare": ([1, 2, 2], 5),
    "empty": ([], 12),
    "empty slot": ([], 1),
    "one step": ([6], 1),
    "one label": ([5], 20),
    "all the same": ([2, 2, 2, 2], 7),
}


def assert_equal_to_torch(batch):
    loss, gradient = found(*batch)
    loss_expected, gradient_expected = expected(*batch)
    assert loss.dtype == torch.float32
    assert gradient.dtype == batch[0].dtype
    torch.testing.assert_close(loss.detach().double(), loss_expected, rtol=2e-6, atol=1e-5)
    # Occupancies are differences of log-probabilities as large as the loss: in float32 that is what is left of them.
    # PyTorch's own in float32 is as far from float64.
    assert (gradient - gradient_expected).abs().max() <= 1e-5 + 1e-6 * loss_expected.max()


@pytest.mark.parametrize("name", HARD_CASES)
def test_ctc_of_a_hard_case_equals_torch(name):
    assert_equal_to_torch(as_batch([HARD_CASES[name]]))


@pytest.mark.parametrize("trials", [1, 2, 3, 8, 17])
def test_ctc_of_random_cases_equals_torch(trials):
    generator = torch.Generator().manual_seed(trials)
    for round_ in range(4):
        cases = []
        for _ in range(trials):
            labels = torch.randint(1, 7, (int(torch.randint(0, 12, (), generator=generator)),), generator=generator)
            repeats = int((labels[1:] == labels[:-1]).sum())
            spare = int(torch.randint(0, 15, (), generator=generator))
            cases.append((labels.tolist(), max(1, len(labels) + repeats + spare)))
        assert_equal_to_torch(as_batch(cases, seed=round_, scale=4.0))


def test_ctc_of_a_long_trial_with_confident_scores_equals_torch():
    labels = torch.randint(1, 41, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    assert_equal_to_torch(as_batch([(labels, 400), (labels[:20], 300)], scale=15.0, classes=41))


def test_ctc_with_more_padding_is_bitwise_the_same():
    logits, labels, steps, lengths, weight = as_batch(list(HARD_CASES.values()))
    loss, gradient = found(logits, labels, steps, lengths, weight)
    wider = torch.cat([logits, torch.full_like(logits[:, :9], 50.0)], dim=1)
    longer = torch.cat([labels, torch.full_like(labels[:, :5], 3)], dim=1)
    loss_padded, gradient_padded = found(wider, longer, steps, lengths, weight)
    assert torch.equal(loss, loss_padded)
    torch.testing.assert_close(gradient, gradient_padded[:, : logits.shape[1]], rtol=1e-6, atol=1e-7)
    assert not gradient_padded[:, logits.shape[1] :].any()


def test_ctc_gradient_of_padded_steps_is_zero():
    logits, labels, steps, lengths, weight = as_batch(list(HARD_CASES.values()))
    _, gradient = found(logits, labels, steps, lengths, weight)
    padding = torch.arange(logits.shape[1]) >= steps.unsqueeze(1)
    assert not gradient[padding].any()
    assert gradient[~padding].any(dim=1).all()


def test_ctc_of_labels_that_do_not_fit_is_large_finite_and_without_gradient():
    cases = [([1, 2, 3], 2), ([2, 2], 2), ([1, 2], 6)]
    batch = as_batch(cases)
    loss, gradient = found(*batch)
    assert (loss[:2] > 1e29).all()
    assert torch.isfinite(loss).all()
    assert not gradient[:2].any()
    loss_fits, gradient_fits = expected(*(part[2:] for part in batch))
    torch.testing.assert_close(loss[2:].detach().double(), loss_fits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[2:].double(), gradient_fits, rtol=1e-5, atol=1e-5)


def test_ctc_without_gradient_gives_the_same_loss():
    logits, labels, steps, lengths, weight = as_batch(list(HARD_CASES.values()))
    loss, _ = found(logits, labels, steps, lengths, weight)
    assert torch.equal(ctc_loss(logits, labels, steps, lengths), loss.detach())


def test_ctc_of_bfloat16_scores_is_float32_inside():
    logits, labels, steps, lengths, weight = as_batch(list(HARD_CASES.values()))
    narrow = logits.bfloat16()
    loss, gradient = found(narrow, labels, steps, lengths, weight)
    loss_wide, gradient_wide = found(narrow.float(), labels, steps, lengths, weight)
    assert torch.equal(loss, loss_wide)
    assert torch.equal(gradient, gradient_wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ctc_in_an_xla_graph_equals_torch_without_leaving_it(on_xla, dtype):
    cases = [*HARD_CASES.values(), ([1, 2, 3], 2)]
    logits, *rest = as_batch(cases)
    logits = logits.to(dtype)
    (loss, gradient), text = on_xla(found, logits, *rest)
    loss_expected, gradient_expected = expected(logits[:-1], *(part[:-1] for part in rest))
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(loss[:-1].double(), loss_expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[:-1].double(), gradient_expected, rtol=tolerance, atol=tolerance)
    assert gradient.dtype == dtype
    assert loss[-1] > 1e29
    assert not gradient[-1].any()
    assert text.count(" while(") == 1
    assert "64[" not in text
    assert not [word for word in (" gather(", " scatter(", " dot(", " sort(") if word in text]
