"""Patches: windows of consecutive bins laid side by side, the sequence that a recurrent layer reads.

In: features by bin. Out: one wide vector a step, and the number of steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def patch_steps(input_bins: int, patch_bins: int, patch_stride: int) -> int:
    """Whole patches in so many bins, at least 1.

    A trial shorter than a patch, or an empty slot, counts 1 step, so that a loss has something to stand on.
    """
    return max(input_bins - patch_bins, 0) // patch_stride + 1


def patch_steps_of(input_bins_B: Tensor, steps: int, patch_bins: int, patch_stride: int) -> Tensor:
    """`patch_steps` of each trial on the device: steps_B, int32, at least 1 and at most `steps` (P).

    torch_xla lowers an integer division to a float32 one, which a TPU rounds as it likes: so the patches that fit are
    counted instead.
    """
    ends = torch.arange(1, steps, dtype=torch.int32, device=input_bins_B.device) * patch_stride + patch_bins
    return (input_bins_B.unsqueeze(1) >= ends).sum(dim=1, dtype=torch.int32) + 1


def patches(features_BTC: Tensor, patch_bins: int, patch_stride: int) -> Tensor:
    """Cuts overlapping windows.

    Args:
        features_BTC: any dtype; T is at least `patch_bins`.
        patch_bins: bins in a window.
        patch_stride: bins from one window to the next.

    Returns:
        patches_PBF, steps first, with P = (T - patch_bins) // patch_stride + 1 and F = patch_bins * C: the bins of a
        window in order, each with its C features.
    """
    trials, bins, features = features_BTC.shape
    assert bins >= patch_bins, f"{bins} bins do not hold a patch of {patch_bins}"
    steps = patch_steps(bins, patch_bins, patch_stride)
    # Blocks of `patch_stride` bins, then a few shifted copies of the row of blocks side by side: slices of whole rows,
    # where a window by window copy would need strided ones (a scatter in the gradient).
    blocks_a_patch = -(-patch_bins // patch_stride)
    blocks = steps + blocks_a_patch - 1
    missing = blocks * patch_stride - bins
    padded_BTC = F.pad(features_BTC, (0, 0, 0, missing)) if missing > 0 else features_BTC[:, : blocks * patch_stride]
    blocks_QBF = padded_BTC.reshape(trials, blocks, patch_stride * features).transpose(0, 1)
    parts = [blocks_QBF[i : i + steps] for i in range(blocks_a_patch)]
    bins_of_last = patch_bins - (blocks_a_patch - 1) * patch_stride
    parts[-1] = parts[-1][:, :, : bins_of_last * features]
    return torch.cat(parts, dim=2)
