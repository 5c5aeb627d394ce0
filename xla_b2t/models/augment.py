"""Noise on the features of a training batch, and the smoothing of every batch, on the core with static shapes.

In: features and lengths of a batch. Out: the same shapes, changed. Nothing is read back, no shape depends on a value.
Random numbers come from the device's generator; who trains sets it for every micro-step (`xla/device.py`).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_b2t.config import AugmentConfig
from xla_b2t.models.scalars import scalar_like


def augment(
    features_BTC: Tensor,
    input_bins_B: Tensor,
    required_steps_B: Tensor,
    settings: AugmentConfig,
    output_steps: Callable[[int], int],
) -> tuple[Tensor, Tensor]:
    """Adds noise and drops a few bins at the start, trial by trial.

    Args:
        features_BTC: any floating dtype, which the result has too.
        input_bins_B: int32, real bins; padding stays 0, so it cannot matter how much of it there is.
        required_steps_B: int32, steps that the labels need; no trial is cut so far that it has fewer.
        settings: how much.
        output_steps: the model's rule from bins to steps, non-decreasing; it is called on the host.

    Returns:
        features_BTC, shifted to the left where bins were dropped, and the bins that are left.
    """
    if settings.white_noise_std > 0:
        features_BTC = features_BTC + torch.randn_like(features_BTC) * settings.white_noise_std
    if settings.constant_offset_std > 0:
        features_BTC = features_BTC + torch.randn_like(features_BTC[:, :1]) * settings.constant_offset_std
    if settings.white_noise_std > 0 or settings.constant_offset_std > 0:
        bins = torch.arange(features_BTC.shape[1], dtype=input_bins_B.dtype, device=features_BTC.device)
        is_real_BT1 = (bins < input_bins_B.unsqueeze(1)).unsqueeze(2)
        features_BTC = torch.where(is_real_BT1, features_BTC, torch.zeros_like(features_BTC))
    if settings.start_shift_bins > 0:
        return shift_start(features_BTC, input_bins_B, required_steps_B, settings.start_shift_bins, output_steps)
    return features_BTC, input_bins_B


def shift_start(
    features_BTC: Tensor,
    input_bins_B: Tensor,
    required_steps_B: Tensor,
    most_bins: int,
    output_steps: Callable[[int], int],
) -> tuple[Tensor, Tensor]:
    """Drops 0 to `most_bins` bins at the start of each trial, each number equally likely; arguments as in `augment`.

    A trial that cannot spare the number drawn is cut as far as it can be.
    """
    least = _least_bins(output_steps, features_BTC.shape[1])
    least_P = torch.tensor(least, dtype=torch.int32).to(features_BTC.device)
    least_B = least_P.index_select(0, required_steps_B.clamp(max=len(least) - 1))
    spare_B = (input_bins_B - least_B).clamp(min=0)
    drawn_B = torch.rand(input_bins_B.shape, dtype=torch.float32, device=features_BTC.device) * (most_bins + 1)
    shift_B = torch.minimum(drawn_B.to(torch.int32).clamp(max=most_bins), spare_B)
    shift_B11 = shift_B.view(-1, 1, 1)
    # A choice among a few shifted copies, fused into one pass; a gather by trial would be slow on a TPU.
    shifted_BTC = features_BTC
    for bins in range(1, most_bins + 1):
        copy_BTC = F.pad(features_BTC[:, bins:], (0, 0, 0, bins))
        shifted_BTC = torch.where(shift_B11 == scalar_like(bins, shift_B), copy_BTC, shifted_BTC)
    return shifted_BTC, input_bins_B - shift_B


def _least_bins(output_steps: Callable[[int], int], bins: int) -> tuple[int, ...]:
    """For 0, 1, ... steps the fewest bins that give them; the last entry is for steps that `bins` do not give."""
    least: list[int] = [0]
    for count in range(bins + 1):
        while len(least) <= output_steps(count):
            least.append(count)
    return (*least, bins + 1)


def smooth(features_BTC: Tensor, sigma_bins: float) -> Tensor:
    """Gaussian smoothing over time, zeros beyond both ends; the same in training and evaluation.

    Args:
        features_BTC: any floating dtype, which the result has too.
        sigma_bins: standard deviation; 0 leaves the features as they are.
    """
    if sigma_bins <= 0:
        return features_BTC
    taps = smoothing_taps(sigma_bins)
    reach, bins = len(taps) // 2, features_BTC.shape[1]
    padded_BTC = F.pad(features_BTC, (0, 0, reach, reach))
    total_BTC = features_BTC * taps[reach]
    for offset in range(1, reach + 1):
        left, right = padded_BTC[:, reach - offset :][:, :bins], padded_BTC[:, reach + offset :][:, :bins]
        total_BTC = total_BTC + (left + right) * taps[reach + offset]
    return total_BTC


def smoothing_taps(sigma_bins: float) -> list[float]:
    """The published recipe's kernel: a Gaussian out to 4 sigma, without its taps up to 0.01; the sum is 1."""
    reach = int(4 * sigma_bins + 0.5)
    weights = [math.exp(-0.5 * (i / sigma_bins) ** 2) for i in range(-reach, reach + 1)]
    kept = [weight / sum(weights) for weight in weights if weight / sum(weights) > 0.01]
    return [weight / sum(kept) for weight in kept]
