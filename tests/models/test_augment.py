"""Augmentation and smoothing: closed forms on plain tensors, random numbers and shapes on the XLA device."""

import re

import numpy as np
import pytest
import torch

from xla_b2t.config import AugmentConfig
from xla_b2t.models.augment import augment, shift_start, smooth, smoothing_taps
from xla_b2t.models.patches import patch_steps

QUIET = AugmentConfig(white_noise_std=0.0, constant_offset_std=0.0, start_shift_bins=0)


def steps(bins):
    return patch_steps(bins, 14, 4)


def sample(trials=6, bins=60, features=4):
    input_bins = torch.tensor([60, 45, 30, 18, 14, 0], dtype=torch.int32)[:trials]
    real = torch.arange(bins) < input_bins.unsqueeze(1)
    values = torch.arange(trials * bins * features, dtype=torch.float32).view(trials, bins, features) + 1
    return values * real.unsqueeze(2), input_bins, torch.ones(trials, dtype=torch.int32)


def test_augment_with_nothing_switched_on_returns_its_input():
    features, input_bins, required = sample()
    result, bins_left = augment(features, input_bins, required, QUIET, steps)
    assert result is features
    assert bins_left is input_bins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_augment_noise_has_the_asked_deviations_and_leaves_padding_zero(dtype):
    torch.manual_seed(0)
    features = torch.zeros(40, 500, 64, dtype=dtype)
    input_bins = torch.full((40,), 400, dtype=torch.int32)
    settings = AugmentConfig(white_noise_std=0.7, constant_offset_std=0.3, start_shift_bins=0)
    result, _ = augment(features, input_bins, torch.ones_like(input_bins), settings, steps)
    assert result.dtype == dtype
    assert not result[:, 400:].any()
    noise = result[:, :400].double()
    offset = noise.mean(dim=1)
    assert offset.std().item() == pytest.approx((0.3**2 + 0.7**2 / 400) ** 0.5, rel=0.05)
    assert (noise - offset.unsqueeze(1)).std().item() == pytest.approx(0.7, rel=0.01)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)


def test_augment_noise_differs_between_trials_bins_and_features():
    features = torch.zeros(2, 30, 3)
    settings = AugmentConfig(white_noise_std=1.0, constant_offset_std=0.0, start_shift_bins=0)
    result, _ = augment(features, torch.tensor([30, 30]).int(), torch.ones(2).int(), settings, steps)
    assert result.unique().numel() == result.numel()


def test_shift_start_moves_the_features_by_the_bins_it_took_off():
    torch.manual_seed(0)
    features, input_bins, required = sample()
    seen = set()
    for _ in range(40):
        result, bins_left = shift_start(features, input_bins, required, 2, steps)
        assert result.shape == features.shape
        assert bins_left.dtype == torch.int32
        for trial, shift in enumerate((input_bins - bins_left).tolist()):
            seen.add((trial, shift))
            assert torch.equal(result[trial, : 60 - shift], features[trial, shift:])
            assert not result[trial, 60 - shift :].any()
    # One step is what any trial counts, and an empty slot has nothing to lose.
    assert seen == {(trial, shift) for trial in range(5) for shift in range(3)} | {(5, 0)}


def test_shift_start_draws_each_number_equally_often():
    torch.manual_seed(0)
    input_bins = torch.full((30_000,), 20, dtype=torch.int32)
    _, left = shift_start(torch.zeros(30_000, 20, 1), input_bins, torch.ones_like(input_bins), 2, steps)
    shares = torch.bincount((20 - left).long(), minlength=3) / 30_000
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=0.02)


@pytest.mark.parametrize(("bins", "needed", "most"), [(60, 12, 2), (58, 12, 0), (59, 12, 1), (60, 13, 0), (60, 0, 2)])
def test_shift_start_never_leaves_fewer_steps_than_the_labels_need(bins, needed, most):
    torch.manual_seed(0)
    input_bins = torch.full((200,), bins, dtype=torch.int32)
    required = torch.full((200,), needed, dtype=torch.int32)
    _, left = shift_start(torch.zeros(200, 60, 1), input_bins, required, 2, steps)
    assert (input_bins - left).max().item() == most
    # What already has too few steps stays as it is; it is not this function's to refuse.
    assert all(steps(count) >= min(needed, steps(bins)) for count in left.tolist())


def test_smoothing_taps_at_the_recipes_width_are_its_nine():
    # What the published pipeline computes with scipy's gaussian_filter1d at sigma 2, cut at 0.01.
    half = [0.2041637, 0.1801738, 0.1238315, 0.0662823, 0.0276305]
    assert smoothing_taps(2.0) == pytest.approx(half[:0:-1] + half, abs=1e-7)
    assert sum(smoothing_taps(3.3)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("bins", [1, 5, 40])
def test_smooth_equals_a_convolution_with_zeros_outside(dtype, tolerance, bins):
    torch.manual_seed(0)
    x = torch.randn(2, bins, 3).to(dtype)
    found = smooth(x, 2.0)
    assert found.dtype == dtype
    for trial in range(2):
        for feature in range(3):
            column = np.concatenate([np.zeros(4), x[trial, :, feature].double().numpy(), np.zeros(4)])
            expected = np.convolve(column, smoothing_taps(2.0), "valid")
            np.testing.assert_allclose(found[trial, :, feature].double().numpy(), expected, atol=tolerance)


def test_smooth_with_width_zero_returns_its_input():
    x = torch.ones(1, 2, 3)
    assert smooth(x, 0.0) is x


def test_augment_on_xla_repeats_with_the_seed_and_does_not_compile_again(xla_device):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    features, input_bins, required = (tensor.to(xla_device) for tensor in sample())
    features = features.bfloat16()
    torch_xla.sync()
    metrics.clear_all()

    def draw(seed):
        xm.set_rng_state(seed, str(xla_device))
        result, left = augment(features, input_bins, required, AugmentConfig(), steps)
        smoothed = smooth(result, 2.0)
        torch_xla.sync()
        return torch_xla._XLAC._xla_get_cpu_tensors([smoothed, left])

    (first, left_first), (second, _), (again, left_again) = draw(1), draw(2), draw(1)
    assert metrics.metric_data("CompileTime")[0] == 1
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert torch.equal(first, again)
    assert torch.equal(left_first, left_again)
    assert not torch.equal(first, second)
    assert first.dtype == torch.bfloat16
    assert left_first.dtype == torch.int32


def test_augment_on_xla_draws_standard_normal_noise(on_xla):
    settings = AugmentConfig(white_noise_std=1.0, constant_offset_std=0.0, start_shift_bins=0)
    inputs = torch.zeros(4, 500, 256).bfloat16(), torch.full((4,), 500).int(), torch.ones(4).int()
    (noise, _), text = on_xla(lambda *placed: augment(*placed, settings, steps), *inputs)
    noise = noise.double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.0, abs=0.01)
    assert noise.std().item() == pytest.approx(1.0, abs=0.01)
    assert (noise.abs() > 3).double().mean().item() == pytest.approx(0.0027, abs=0.0005)
    # 64-bit integers only where torch_xla derives the state of its generator: scalars, and one pair.
    assert set(re.findall(r"\b[suf]64\[(\d*)[\],]", text)) <= {"", "1", "2"}
