"""The layer with its kernels in place: Pallas interprets them here, in the place of a TPU."""

import pytest
import torch

from xla_b2t.models.gru import gru_layer
from xla_b2t.xla import gru_kernel

pytest.importorskip("jax", reason="kernels need JAX, which has wheels for CPython 3.11 and 3.12")


def leaves(size=128, shared_first=False):
    torch.manual_seed(3)
    shapes = ((5, 16, size), (1 if shared_first else 16, size), (3 * size, size), (3 * size, size))
    shapes += ((3 * size,), (3 * size,))
    return [(torch.randn(shape) * size**-0.5).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shared_first", [False, True])
def test_layer_with_kernels_equals_the_layer_with_loops(interpreted, xla_device, shared_first):
    given = [tensor.detach().to(xla_device).requires_grad_() for tensor in leaves(shared_first=shared_first)]
    weights = torch.randn(5, 16, 128).bfloat16().to(xla_device)
    results = []
    for kernel in (False, True):
        hidden = gru_layer(*given, kernel)
        results.append([tensor.cpu() for tensor in (hidden, *torch.autograd.grad(hidden, given, weights))])
    assert interpreted == [("_forward", True), ("_backward",)]
    for loop, kernel in zip(*results, strict=True):
        assert (loop.shape, loop.dtype) == (kernel.shape, kernel.dtype)
        assert (loop.float() - kernel.float()).norm() < 0.02 * loop.float().norm()


def test_layer_in_evaluation_keeps_nothing(interpreted, xla_device):
    given = [tensor.detach().to(xla_device).requires_grad_() for tensor in leaves()]
    with torch.no_grad():
        hidden = gru_layer(*given, True)
    assert (hidden.shape, interpreted) == ((5, 16, 128), [("_forward", False)])


@pytest.mark.parametrize("kind", ["cpu", "TPU v3", "TPU v4", "TPU v9"])
def test_layer_on_a_device_that_was_not_tried_is_a_loop(interpreted, monkeypatch, xla_device, kind):
    monkeypatch.setattr(gru_kernel, "device_kind", lambda: kind)
    gru_layer(*(tensor.to(xla_device) for tensor in leaves()), True)
    assert interpreted == []


@pytest.mark.parametrize(
    ("trials", "hidden", "dtype"),
    [(16, 100, torch.bfloat16), (12, 128, torch.bfloat16), (16, 128, torch.float32), (64, 7168, torch.bfloat16)],
)
def test_kernels_do_not_fit_other_tiles_dtypes_or_more_than_vmem(interpreted, trials, hidden, dtype):
    assert gru_kernel.fits(16, 128, torch.bfloat16)
    assert not gru_kernel.fits(trials, hidden, dtype)
