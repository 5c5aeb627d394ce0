"""A bias gradient that does not stop growing."""

import torch

from xla_b2t.models.bias import add_bias, sum_rows


def test_add_bias_adds_on_the_last_axis_with_the_gradient_of_torch():
    torch.manual_seed(0)
    x, bias = torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    found = torch.autograd.grad((add_bias(x, bias) ** 2).sum(), (x, bias))
    expected = torch.autograd.grad(((x + bias) ** 2).sum(), (x, bias))
    assert torch.equal(add_bias(x, bias), x + bias)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_bias_gradient_in_bfloat16_counts_beyond_256_on_xla(on_xla):
    def gradient(x, bias):
        bias.requires_grad_()
        outputs = add_bias(x, bias)
        return torch.autograd.grad(outputs, bias, torch.ones_like(outputs))

    (found,), _ = on_xla(gradient, torch.zeros(64, 1024, 2).bfloat16(), torch.zeros(2).bfloat16())
    assert found.tolist() == [65536, 65536]
    assert found.dtype == torch.bfloat16


def test_sum_rows_keeps_float64():
    assert sum_rows(torch.ones(3, 2, dtype=torch.float64)).dtype == torch.float64
