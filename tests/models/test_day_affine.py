"""The day layer against an einsum over each trial's own matrix."""

import torch

from xla_b2t.models.day_affine import DayAffine, select_days, softsign

DAYS, TRIALS, BINS, FEATURES = 4, 6, 5, 3


def sample(dtype=torch.float32):
    torch.manual_seed(0)
    layer = DayAffine(DAYS, FEATURES)
    with torch.no_grad():
        layer.day_weight.add_(torch.randn(DAYS, FEATURES, FEATURES))
        layer.day_bias.add_(torch.randn(DAYS, FEATURES))
    days = torch.tensor([2, 0, 2, 2, 3, 0], dtype=torch.int32)
    return torch.randn(TRIALS, BINS, FEATURES).to(dtype), days, layer.to(dtype)


def plain(x, days, weight, bias):
    mapped = torch.einsum("btc,bcd->btd", x, weight[days.long()]) + bias[days.long()].unsqueeze(1)
    return torch.nn.functional.softsign(mapped)


def test_day_affine_at_first_is_a_softsign():
    x = torch.randn(2, 3, FEATURES)
    layer = DayAffine(DAYS, FEATURES)
    torch.testing.assert_close(layer(x, torch.tensor([0, 3], dtype=torch.int32)), softsign(x))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "day_weight": (DAYS, FEATURES, FEATURES),
        "day_bias": (DAYS, FEATURES),
    }


def test_day_affine_output_and_gradients_equal_an_einsum():
    x, days, layer = sample()
    leaves = (x.requires_grad_(), layer.day_weight, layer.day_bias)
    expected = plain(x, days, layer.day_weight, layer.day_bias)
    found = layer(x, days)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad((found**2).sum(), leaves), torch.autograd.grad((expected**2).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_day_affine_gradient_of_a_day_that_is_not_in_the_batch_is_zero():
    x, days, layer = sample()
    layer(x, days).sum().backward()
    assert not layer.day_weight.grad[1].any()
    assert layer.day_weight.grad[3].any()


def test_day_affine_in_bfloat16_stays_there_on_xla(on_xla):
    x, days, layer = sample(torch.bfloat16)

    def run(x, days, weight, bias):
        placed = DayAffine(DAYS, FEATURES).bfloat16().to(x.device)
        with torch.no_grad():
            placed.day_weight.copy_(weight)
            placed.day_bias.copy_(bias)
        outputs = placed(x, days)
        return outputs, *torch.autograd.grad(outputs, (placed.day_weight, placed.day_bias), torch.ones_like(outputs))

    found, text = on_xla(run, x, days, layer.day_weight, layer.day_bias)
    leaves = [layer.day_weight.detach().float().requires_grad_(), layer.day_bias.detach().float().requires_grad_()]
    expected = plain(x.float(), days, *leaves)
    for one, other in zip(found, [expected, *torch.autograd.grad(expected.sum(), leaves)], strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).abs().max() <= 2e-2 * other.abs().max()
    assert "64[" not in text
    assert " scatter(" not in text


def test_select_days_sums_a_bfloat16_gradient_in_float32(on_xla):
    def gradient(stacked, days):
        stacked.requires_grad_()
        chosen = select_days(stacked, days)
        return torch.autograd.grad(chosen, stacked, torch.ones_like(chosen))

    (found,), _ = on_xla(gradient, torch.zeros(2, 3).bfloat16(), torch.zeros(600, dtype=torch.int32))
    assert found.tolist() == [[600.0] * 3, [0.0] * 3]
