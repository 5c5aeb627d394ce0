"""The three networks of `noise_split`: size, shapes, who is trained by what, and what is left out in evaluation."""

import re

import pytest
import torch

from xla_b2t.config import ModelConfig
from xla_b2t.models.build import build_model
from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.gru import GruStack
from xla_b2t.models.loss import trial_losses
from xla_b2t.models.patches import patches
from xla_b2t.models.protocol import Sizes, head_logits
from xla_b2t.models.reversal import ramp

SIZES = Sizes(num_features=6, num_days=3, num_classes=5)
OPTIONS = {
    "patch_bins": 4, "patch_stride": 2, "hidden": 8, "noise_layers": 2, "clean_layers": 3, "noisy_layers": 1,
    "dropout": 0.0, "input_dropout": 0.0,
}  # fmt: skip
LABELS_BL = torch.tensor([[1, 2, 2], [3, 1, 0], [4, 0, 0], [0, 0, 0]]).int()
LENGTHS_B = torch.tensor([3, 2, 1, 0]).int()


def small(**changes):
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="noise_split", options=OPTIONS | changes), SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def sample():
    torch.manual_seed(1)
    features = torch.randn(4, 20, SIZES.num_features)
    return features, torch.tensor([20, 13, 9, 0]).int(), torch.tensor([0, 2, 1, 0]).int()


def losses(model, strength):
    """(clean, noisy) CTC loss in training at a strength of the reversal, and the loss that is trained on."""
    output = model.train()(*sample(), torch.tensor([strength]))
    clean, noisy = output.logits_BPK, output.heads[0].logits_BPK
    parts = [ctc_loss(logits, LABELS_BL, output.steps_B, LENGTHS_B).sum() for logits in (clean, noisy)]
    return (*parts, trial_losses(output, LABELS_BL, LENGTHS_B).objective_B.sum())


def gradients(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(model.named_parameters(), found, strict=True)
    }


def test_noise_split_has_the_number_of_parameters_of_the_published_sizes():
    with torch.device("meta"):
        model = build_model(ModelConfig(name="noise_split"), Sizes(512, 45, 41))
    assert sum(parameter.numel() for parameter in model.parameters()) == 687_568_466
    assert model.noise_gru.weight_hh_l1.shape == (3 * 7168, 7168)
    assert {tuple(h0.shape) for h0 in (model.noise_h0, model.clean.h0)} == {(1, 1, 7168), (1, 1, 768)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_split_gives_scores_and_gradients_in_its_dtype(dtype):
    model = small().to(dtype)
    features, input_bins, days = sample()
    output = model(features.to(dtype), input_bins, days, torch.tensor([0.5]))
    (head,) = output.heads
    assert head.name == "noisy"
    assert output.logits_BPK.shape == head.logits_BPK.shape == (4, 9, 5)
    assert {output.logits_BPK.dtype, head.logits_BPK.dtype} == {dtype}
    assert output.steps_B.dtype == torch.int32
    assert output.steps_B.tolist() == [model.output_steps(count) for count in input_bins.tolist()] == [9, 5, 3, 1]
    trial_losses(output, LABELS_BL, LENGTHS_B).objective_B.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_noise_split_decodes_the_patches_without_the_estimated_noise():
    model = small().eval()
    features, input_bins, days = sample()
    noise_PBF = model.noise_gru(patches(model.noise_day(features, days), 4, 2), model.noise_h0)
    seen_PBF = patches(model.clean_day(features, days), 4, 2) - noise_PBF
    output = model(features, input_bins, days)
    assert torch.equal(output.logits_BPK, model.clean(seen_PBF))
    assert torch.equal(output.heads[0].logits_BPK, model.noisy(noise_PBF))


def test_noise_split_trains_the_noise_network_for_the_clean_and_against_the_noisy_one():
    strength, clean_weight, noisy_weight = 0.3, 0.5, 2.0
    model = small(clean_weight=clean_weight, noisy_weight=noisy_weight)
    by_clean = gradients(losses(model, 0.0)[0], model)
    by_noisy = gradients(losses(model, -1.0)[1], model)  # minus minus 1: as without reversal
    together = gradients(losses(model, strength)[2], model)
    for name, gradient in together.items():
        sign = -strength if name.startswith("noise_") else 1.0
        expected = clean_weight * by_clean[name] + sign * noisy_weight * by_noisy[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5, msg=name)
        assert by_clean[name].any() == (not name.startswith("noisy.")), name
        assert by_noisy[name].any() == (not name.startswith("clean")), name


def test_noise_split_schedules_the_strength_of_the_reversal():
    model = small(reversal=0.5, reversal_warmup_steps=10, reversal_ramp_steps=20)
    assert [model.scheduled(step) for step in (0, 10, 17, 99)] == [
        [0.5 * ramp(step, 10, 20)] for step in (0, 10, 17, 99)
    ]
    assert model.scheduled(99) == [pytest.approx(0.5, abs=1e-4)]


def test_noise_split_in_training_without_its_strength_is_our_fault():
    with pytest.raises(AssertionError, match="needs the strength of the reversal"):
        small()(*sample())


def test_noise_split_dropout_acts_in_training_only():
    model = small(dropout=0.5, input_dropout=0.2)
    batch, strength = sample(), torch.zeros(1)
    assert not torch.equal(model(*batch, strength).logits_BPK, model(*batch, strength).logits_BPK)
    model.eval()
    assert torch.equal(model(*batch).logits_BPK, model(*batch).logits_BPK)


def test_noise_split_initialises_the_wide_network_with_the_variance_of_an_orthogonal_one():
    torch.manual_seed(0)
    drawn = GruStack(64, 64, 1).weight_hh_l0
    orthogonal = torch.nn.init.orthogonal_(torch.empty_like(drawn))
    assert drawn.std().item() == pytest.approx(orthogonal.std().item(), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_split_on_xla_trains_in_its_dtype(on_xla, xla_device, dtype):
    placed = small().to(dtype).to(xla_device)

    def step(features, input_bins, days, labels, lengths, strength):
        output = placed(features, input_bins, days, strength)
        loss = trial_losses(output, labels, lengths).objective_B.sum()
        return [loss, *torch.autograd.grad(loss, list(placed.parameters()))]

    features, *rest = sample()
    found, text = on_xla(step, features.to(dtype), *rest, LABELS_BL, LENGTHS_B, torch.tensor([0.3]))
    assert found[0].dtype == torch.float32
    assert {gradient.dtype for gradient in found[1:]} == {dtype}
    assert text.count(" while(") == 2 * (2 + 3 + 1) + 2, "two scans a layer and one for each CTC loss"
    assert not re.findall(r"\b[uf]64\[", text)
    assert not [line for line in text.splitlines() if " dot(" in line and dtype == torch.bfloat16 and "f32[" in line]
    if dtype == torch.float32:
        expected = losses(small(), 0.3)[2]
        torch.testing.assert_close(found[0], expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("head", "layers"), [("", 2 + 3), ("noisy", 2 + 1)])
def test_noise_split_in_evaluation_computes_the_head_that_is_decoded_alone(on_xla, xla_device, head, layers):
    placed = small().to(xla_device).eval()

    def decode(*batch):
        with torch.no_grad():
            return [head_logits(placed(*batch), head, placed).argmax(-1)]

    (found,), text = on_xla(decode, *sample())
    assert text.count(" while(") == layers
    with torch.no_grad():
        assert torch.equal(found, head_logits(small().eval()(*sample()), head, placed).argmax(-1))
