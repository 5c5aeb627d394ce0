"""Dropout: what is kept, how it is scaled, and that the mean stays."""

import pytest
import torch

from xla_b2t.models.dropout import dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rate", "kept"), [(0.2, 102), (0.4, 77), (0.5, 64)])
def test_dropout_keeps_the_rate_and_the_mean(dtype, rate, kept):
    torch.manual_seed(0)
    x = torch.ones(400_000, dtype=dtype)
    result = dropout(x, rate, training=True)
    assert result.dtype == dtype
    assert set(result.unique().tolist()) == {0.0, torch.tensor(128 / kept, dtype=dtype).item()}
    assert (result > 0).double().mean().item() == pytest.approx(kept / 128, abs=3e-3)
    assert result.double().mean().item() == pytest.approx(1.0, abs=6e-3)


def test_dropout_on_xla_keeps_the_rate_and_the_mean(on_xla):
    def both(x):
        x.requires_grad_()
        result = dropout(x, 0.2, training=True)
        return result, *torch.autograd.grad(result, x, torch.ones_like(result))

    (result, gradient), _ = on_xla(both, torch.ones(500, 800).bfloat16())
    assert result.dtype == gradient.dtype == torch.bfloat16
    assert torch.equal(result, gradient)
    assert (result > 0).double().mean().item() == pytest.approx(102 / 128, abs=3e-3)
    assert result.double().mean().item() == pytest.approx(1.0, abs=6e-3)
    assert (result > 0).double().mean(dim=0).std().item() < 0.03  # no column is dropped more than another


def test_dropout_draws_anew_each_time():
    x = torch.ones(1000)
    assert not torch.equal(dropout(x, 0.5, True), dropout(x, 0.5, True))


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_dropout_when_nothing_is_dropped_returns_its_input(rate, training):
    x = torch.ones(10)
    assert dropout(x, rate, training) is x


def test_dropout_rate_of_one_is_refused():
    with pytest.raises(AssertionError, match="keeps nothing"):
        dropout(torch.ones(3), 1.0, True)
