"""Noise belongs to (seed, rank, step, micro-step): it repeats, and it differs where any of them does."""

import itertools

import pytest
import torch
from torch_xla.debug import metrics

from xla_b2t.xla.device import set_noise, sync, to_device, to_host

KEYS = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 7, 119_999, 3)]


def draw(device, key):
    set_noise(*key)
    noise = torch.randn(64, device=device)
    sync()
    return to_host([noise])[0]


def test_set_noise_of_one_key_repeats_without_a_compile(xla_device):
    first = draw(xla_device, KEYS[0])
    draw(xla_device, KEYS[-1])
    before = metrics.metric_data("CompileTime")[0]
    torch.testing.assert_close(draw(xla_device, KEYS[0]), first, rtol=0, atol=0)
    assert metrics.metric_data("CompileTime")[0] == before


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(KEYS, 2)))
def test_set_noise_of_other_keys_differs(xla_device, one, other):
    first, second = draw(xla_device, one), draw(xla_device, other)
    assert not torch.equal(first, second)
    assert abs(float((first * second).mean())) < 0.6


def test_to_device_and_back_keeps_values_and_dtypes(xla_device):
    tensors = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)]
    there = to_device(tensors)
    assert {tensor.device.type for tensor in there} == {"xla"}
    for found, expected in zip(to_host(there), tensors, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
