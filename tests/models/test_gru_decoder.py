"""The baseline decoder against the same model written with PyTorch's own layers."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.config import ModelConfig
from xla_b2t.errors import DtypeError
from xla_b2t.models.build import build_model
from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.protocol import Sizes

SIZES = Sizes(num_features=6, num_days=3, num_classes=5)
PATCH, STRIDE, HIDDEN, LAYERS = 7, 3, 8, 2
OPTIONS = {"patch_bins": PATCH, "patch_stride": STRIDE, "hidden": HIDDEN, "layers": LAYERS}


def small(**changes):
    torch.manual_seed(0)
    model = build_model(ModelConfig(options=OPTIONS | changes), SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def sample(bins=40):
    torch.manual_seed(1)
    features = torch.randn(5, bins, SIZES.num_features)
    return features, torch.tensor([40, 33, 9, 7, 0]).int(), torch.tensor([0, 2, 1, 2, 0]).int()


def plain(model, features, days):
    """The published architecture, layer by layer; logits_BPK."""
    weight, bias = model.day.day_weight[days.long()], model.day.day_bias[days.long()]
    mapped = F.softsign(torch.einsum("btd,bdk->btk", features, weight) + bias.unsqueeze(1))
    windows = mapped.unfold(1, PATCH, STRIDE).transpose(2, 3).flatten(2)
    gru = getattr(nn.GRU, "_orig", nn.GRU)(windows.shape[2], HIDDEN, LAYERS, batch_first=True)
    gru.load_state_dict(model.gru.state_dict())
    hidden, _ = gru(windows, model.h0.expand(LAYERS, len(features), HIDDEN).contiguous())
    return F.linear(hidden, model.out.weight, model.out.bias)


def test_gru_decoder_equals_the_plain_model():
    model = small().eval()
    features, input_bins, days = sample()
    output = model(features, input_bins, days)
    torch.testing.assert_close(output.logits_BPK, plain(model, features, days), rtol=1e-5, atol=1e-5)
    assert output.steps_B.tolist() == [12, 9, 1, 1, 1]
    assert output.steps_B.dtype == torch.int32
    assert output[2:] == (None, (), 1.0)
    assert [model.output_steps(count) for count in input_bins.tolist()] == output.steps_B.tolist()


def test_gru_decoder_initialises_as_the_published_one():
    torch.manual_seed(0)
    model = build_model(ModelConfig(options=OPTIONS), SIZES)
    assert torch.equal(model.day.day_weight.detach(), torch.eye(6).expand(3, 6, 6))
    assert not model.day.day_bias.any()
    recurrent = model.gru.weight_hh_l1.detach()
    torch.testing.assert_close(recurrent.t() @ recurrent, torch.eye(HIDDEN), rtol=0, atol=1e-5)
    for weight in (model.gru.weight_ih_l0, model.out.weight):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.8 * bound < weight.abs().max().item() <= bound
    assert model.h0.shape == (1, 1, HIDDEN)
    assert model.h0.any()
    assert model.gru.bias_ih_l0.any()


def test_gru_decoder_padding_of_time_does_not_matter():
    model = small().eval()
    features, input_bins, days = sample()
    wider = torch.cat([features, torch.full((5, 9, SIZES.num_features), 7.0)], dim=1)
    short, long = model(features, input_bins, days), model(wider, input_bins, days)
    assert torch.equal(short.steps_B, long.steps_B)
    torch.testing.assert_close(long.logits_BPK[:, : short.logits_BPK.shape[1]], short.logits_BPK, rtol=1e-6, atol=1e-6)


def test_gru_decoder_dropout_acts_in_training_only():
    model = small(dropout=0.5, input_dropout=0.0)
    batch = sample()
    assert not torch.equal(model(*batch).logits_BPK, model(*batch).logits_BPK)
    model.eval()
    assert torch.equal(model(*batch).logits_BPK, model(*batch).logits_BPK)


def test_gru_decoder_fed_another_dtype_names_both():
    features, input_bins, days = sample()
    with pytest.raises(DtypeError, match=r"the features are torch\.float32, the day layers are torch\.bfloat16"):
        small().bfloat16()(features, input_bins, days)


def forward_and_backward(model, batch, labels, lengths):
    output = model(*batch)
    loss = ctc_loss(output.logits_BPK, labels, output.steps_B, lengths)
    return [output.logits_BPK, output.steps_B, loss, *torch.autograd.grad(loss.sum(), list(model.parameters()))]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_gru_decoder_on_xla_equals_itself_on_plain_tensors(on_xla, xla_device, dtype, tolerance):
    reference = small(dropout=0.0, input_dropout=0.0).to(dtype).float()
    features, input_bins, days = sample()
    features = features.to(dtype)
    labels = torch.tensor([[1, 2, 2], [3, 1, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]]).int()
    lengths = torch.tensor([3, 2, 1, 0, 0]).int()
    expected = forward_and_backward(reference, (features.float(), input_bins, days), labels, lengths)
    placed = small(dropout=0.0, input_dropout=0.0).to(dtype).to(xla_device)
    found, text = on_xla(
        lambda *x: forward_and_backward(placed, x[:3], *x[3:]), features, input_bins, days, labels, lengths
    )
    assert {tensor.dtype for tensor in (found[0], *found[3:])} == {dtype}
    assert found[1].dtype == torch.int32
    assert found[2].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance * max(1.0, other.double().abs().max())
    assert text.count(" while(") == 2 * LAYERS + 1
    assert not re.findall(r"\b[uf]64\[", text)
    assert not re.findall(r"\bs64\[\d", text)
    assert not [line for line in text.splitlines() if " dot(" in line and dtype == torch.bfloat16 and "f32[" in line]


def test_gru_decoder_graph_does_not_grow_with_time(xla_device):
    import torch_xla

    placed = small(dropout=0.0, input_dropout=0.0).bfloat16().to(xla_device)
    sizes = []
    for bins in (40, 400):
        features, input_bins, days = sample(bins)
        output = placed(features.bfloat16().to(xla_device), input_bins.to(xla_device), days.to(xla_device))
        gradients = torch.autograd.grad(output.logits_BPK.float().sum(), list(placed.parameters()))
        sizes.append(len(torch_xla._XLAC._get_xla_tensors_hlo(list(gradients)).splitlines()))
    assert sizes[0] == sizes[1]
