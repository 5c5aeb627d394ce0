"""Patches against `unfold`, and the two forms of the rule from bins to steps."""

import pytest
import torch

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches


def plain(x, patch_bins, patch_stride):
    return x.unfold(1, patch_bins, patch_stride).permute(1, 0, 3, 2).flatten(2)


@pytest.mark.parametrize("bins", [14, 15, 17, 18, 50, 53])
@pytest.mark.parametrize(("patch_bins", "patch_stride"), [(14, 4), (8, 4), (3, 5), (1, 1), (7, 1), (14, 14)])
def test_patches_and_their_gradient_equal_unfold(bins, patch_bins, patch_stride):
    torch.manual_seed(bins)
    x = torch.randn(3, bins, 2, dtype=torch.float64, requires_grad=True)
    expected, found = plain(x, patch_bins, patch_stride), patches(x, patch_bins, patch_stride)
    assert torch.equal(found, expected)
    assert found.shape[0] == patch_steps(bins, patch_bins, patch_stride)
    weight = torch.randn_like(expected)
    (one,), (other,) = (torch.autograd.grad((y * weight).sum(), x) for y in (found, expected))
    torch.testing.assert_close(one, other)


def test_patches_of_too_few_bins_are_refused():
    with pytest.raises(AssertionError, match="13 bins do not hold a patch of 14"):
        patches(torch.zeros(1, 13, 2), 14, 4)


@pytest.mark.parametrize(("bins", "steps"), [(0, 1), (13, 1), (14, 1), (17, 1), (18, 2), (1000, 247), (2475, 616)])
def test_patch_steps_counts_whole_patches_and_at_least_one(bins, steps):
    assert patch_steps(bins, 14, 4) == steps


def test_patch_steps_on_xla_equal_the_host_and_are_int32(on_xla):
    bins = torch.arange(0, 200, dtype=torch.int32)
    limit = patch_steps(199, 14, 3)
    (found,), text = on_xla(lambda x: [patch_steps_of(x, limit, 14, 3)], bins)
    assert found.dtype == torch.int32
    assert found.tolist() == [patch_steps(count, 14, 3) for count in range(200)]
    assert "64[" not in text
    assert " divide(" not in text
