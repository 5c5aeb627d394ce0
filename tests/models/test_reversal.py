"""Gradient reversal against its closed form, and the rise of its strength."""

import math
from itertools import pairwise

import pytest
import torch

from xla_b2t.models.reversal import ramp, reverse_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reverse_gradient_is_the_identity_and_turns_the_gradient_by_its_strength(dtype):
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 4, dtype=dtype)
    y = reverse_gradient(x, torch.tensor(0.5))
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    assert torch.equal(gradient, -0.5 * weight)


def test_reverse_gradient_leaves_what_stands_behind_it_alone():
    x, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    behind, before = torch.autograd.grad((reverse_gradient(x, torch.tensor(2.0)) * weight).sum(), [weight, x])
    assert torch.equal(behind, x)
    assert torch.equal(before, -2 * weight)


def test_reverse_gradient_on_xla_takes_its_strength_as_an_input(on_xla):
    def gradient(x, strength):
        x = x.requires_grad_()
        return torch.autograd.grad(reverse_gradient(x, strength[0]).square().sum(), x)

    x = torch.randn(5).bfloat16()
    (half,), text = on_xla(gradient, x, torch.tensor([0.5]))
    (whole,), other = on_xla(gradient, x, torch.tensor([1.0]))
    assert torch.equal(half, -x)
    assert torch.equal(whole, -2 * x)
    assert text == other


def test_ramp_follows_its_formula_between_warm_up_and_end():
    assert [ramp(step, 10, 100) for step in (0, 9, 10)] == [0.0, 0.0, 0.0]
    assert ramp(60, 10, 100) == pytest.approx(2 / (1 + math.exp(-5)) - 1)
    assert ramp(110, 10, 100) == ramp(10_000, 10, 100) == pytest.approx(0.99991, abs=1e-5)
    rising = [ramp(step, 10, 100) for step in range(10, 111)]
    assert all(one < other for one, other in pairwise(rising))


def test_ramp_of_no_steps_is_a_jump():
    assert [ramp(step, 3, 0) for step in (2, 3, 4)] == [0.0, pytest.approx(1, abs=1e-4), pytest.approx(1, abs=1e-4)]
