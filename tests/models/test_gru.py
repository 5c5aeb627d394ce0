"""The GRU stack against PyTorch's own: output and gradients, three dtypes, plain tensors and an XLA graph."""

import re

import pytest
import torch
from torch import nn

from xla_b2t.errors import DtypeError
from xla_b2t.models.gru import GruStack, gru_layer

INPUTS, HIDDEN, LAYERS, STEPS, TRIALS = 6, 5, 3, 9, 4


def stacks(dtype, layers=LAYERS):
    """Ours and PyTorch's with the same weights; torch_xla replaces `nn.GRU`, and keeps the original as `_orig`."""
    torch.manual_seed(1)
    theirs = getattr(nn.GRU, "_orig", nn.GRU)(INPUTS, HIDDEN, layers).to(dtype)
    ours = GruStack(INPUTS, HIDDEN, layers).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def sample(dtype, first_shape):
    torch.manual_seed(2)
    return torch.randn(STEPS, TRIALS, INPUTS, dtype=dtype), torch.randn(first_shape, dtype=dtype)


def gradients(outputs, *leaves):
    """Of a weighted sum, so that every step and unit counts differently."""
    weight = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float32).view(outputs.shape).to(outputs)
    return torch.autograd.grad((outputs * weight).sum(), leaves)


def run_ours(x, first, *weights):
    """Layer by layer, as a function of plain tensors."""
    leaves = [tensor.requires_grad_() for tensor in (x, first, *weights)]
    for layer in range(len(weights) // 4):
        initial = first[layer] if first.shape[0] > 1 else first.squeeze(0)
        x = gru_layer(x, initial, *weights[4 * layer : 4 * layer + 4])
    return [x, *gradients(x, *leaves)]


def run_theirs(theirs, x, first):
    leaves = [x.requires_grad_(), first.requires_grad_(), *theirs.parameters()]
    outputs, _ = theirs(x, first.expand(theirs.num_layers, TRIALS, HIDDEN).contiguous())
    return [outputs, *gradients(outputs, *leaves)]


def assert_relatively_close(found, expected, tolerance):
    assert found.shape == expected.shape
    scale = expected.double().abs().max()
    assert (found.double() - expected.double()).abs().max() <= tolerance * scale


@pytest.mark.parametrize("first_shape", [(1, 1, HIDDEN), (LAYERS, 1, HIDDEN), (LAYERS, TRIALS, HIDDEN)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gru_output_and_gradients_equal_torch(dtype, tolerance, first_shape):
    _, theirs = stacks(dtype)
    x, first = sample(dtype, first_shape)
    expected = run_theirs(theirs, x.clone(), first.clone())
    found = run_ours(x, first, *(parameter.detach() for parameter in theirs.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert_relatively_close(one, other, tolerance)


def test_gru_in_an_xla_graph_equals_torch_without_leaving_it(on_xla):
    _, theirs = stacks(torch.float32, layers=2)
    x, first = sample(torch.float32, (1, 1, HIDDEN))
    expected = run_theirs(theirs, x.clone(), first.clone())
    found, text = on_xla(run_ours, x, first, *theirs.parameters())
    for one, other in zip(found, expected, strict=True):
        assert_relatively_close(one, other, 1e-5)
    assert text.count(" while(") == 4
    assert "64[" not in text


def test_gru_in_bfloat16_stays_bfloat16_and_near_float32(on_xla):
    _, theirs = stacks(torch.float32, layers=2)
    x, first = sample(torch.float32, (1, 1, HIDDEN))
    narrow = [tensor.detach().bfloat16() for tensor in (x, first, *theirs.parameters())]
    expected = run_ours(*(tensor.float() for tensor in narrow))
    found, text = on_xla(run_ours, *narrow)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    for one, other in zip(found, expected, strict=True):
        assert_relatively_close(one, other, 2e-2)
    # The only float32 there is: sums of a bias or a shared first state, and products, which torch_xla computes in
    # float32 and rounds at once. No matmul, no loop state, no sum of two.
    assert set(re.findall(r"= f32\[\d[\d,]*\]\S* ([a-z\-]+)\(", text)) <= {"convert", "reduce", "multiply"}
    assert not [line for line in text.splitlines() if " while(" in line and "f32[" in line]


def test_gru_plain_bfloat16_bias_gradient_is_summed_in_float32():
    ones = torch.ones(20, 200, 1, dtype=torch.bfloat16)
    zero = torch.zeros(3, 1, dtype=torch.bfloat16)
    bias = torch.zeros(3, dtype=torch.bfloat16)
    bias_ih = bias.clone().requires_grad_()
    outputs = gru_layer(ones, zero[:1], zero, zero, bias_ih, bias)
    (gradient,) = torch.autograd.grad(outputs, bias_ih, torch.ones_like(outputs))
    # With all weights 0 both gates are 1/2: a step adds 1/2 at its own place and 1/4, 1/8, ... at those after it.
    assert gradient[2].item() == pytest.approx(20 * 200 - 200, rel=1e-2)


def test_gru_evaluation_gives_the_same_output():
    ours, _ = stacks(torch.float32)
    x, first = sample(torch.float32, (1, 1, HIDDEN))
    with torch.no_grad():
        quiet = ours(x, first)
    assert torch.equal(quiet, ours(x, first).detach())


def test_gru_dropout_acts_between_layers_in_training_only():
    x, first = sample(torch.float32, (1, 1, HIDDEN))
    ours = GruStack(INPUTS, HIDDEN, 2, dropout=0.5)
    assert not torch.equal(ours(x, first), ours(x, first))
    ours.eval()
    assert torch.equal(ours(x, first), ours(x, first))
    single = GruStack(INPUTS, HIDDEN, 1, dropout=0.5)
    assert torch.equal(single(x, first), single(x, first))


def test_gru_with_first_states_of_another_dtype_names_both():
    ours = GruStack(INPUTS, HIDDEN, 1).bfloat16()
    x, first = sample(torch.bfloat16, (1, 1, HIDDEN))
    with pytest.raises(
        DtypeError, match=r"the first state is torch.float32, the weights of the recurrence are torch.bfloat16"
    ):
        ours(x, first.float())


def test_gru_gradient_reaches_only_what_asks_for_it():
    _, theirs = stacks(torch.float32, layers=1)
    x, first = sample(torch.float32, (1, HIDDEN))
    weights = [parameter.detach() for parameter in theirs.parameters()]
    weights[1].requires_grad_()
    gru_layer(x, first, *weights).sum().backward()
    assert weights[1].grad is not None
    assert x.grad is None
