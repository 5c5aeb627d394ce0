"""The layer with its kernels in place: Pallas interprets them here, in the place of a TPU."""

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.models.gru import GruStack, check_kernels, gru_layer
from xla_b2t.xla import gru_kernel, tpu_kernel

pytest.importorskip("jax", reason="kernels need JAX, which has wheels for CPython 3.11 and 3.12")


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run by Pallas's interpreter; counts the calls."""
    import jax.numpy as jnp
    import numpy as np

    calls = []

    def call(kernel, tensors, **options):
        calls.append(kernel.__name__)
        arrays = [jnp.asarray(tensor.detach().cpu().float().numpy()).astype(jnp.bfloat16) for tensor in tensors]
        results = kernel(*arrays, interpret=True, **options)
        narrow = [str(result.dtype) == "bfloat16" for result in results]
        hosts = [torch.from_numpy(np.array(result.astype("float32"))) for result in results]
        return [
            (host.bfloat16() if is_narrow else host).to(tensors[0].device)
            for host, is_narrow in zip(hosts, narrow, strict=True)
        ]

    monkeypatch.setattr(tpu_kernel, "call", call)
    monkeypatch.setattr(tpu_kernel, "kernels_run", lambda tensor: True)
    return calls


def leaves(size=128, shared_first=False):
    torch.manual_seed(3)
    shapes = ((5, 16, size), (1 if shared_first else 16, size), (3 * size, size), (3 * size, size))
    shapes += ((3 * size,), (3 * size,))
    return [(torch.randn(shape) * size**-0.5).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shared_first", [False, True])
def test_layer_with_kernels_equals_the_layer_with_loops(interpreted, shared_first):
    given = leaves(shared_first=shared_first)
    weights = torch.randn(5, 16, 128).bfloat16()
    results = []
    for kernel in (False, True):
        hidden = gru_layer(*given, kernel)
        results.append([hidden, *torch.autograd.grad(hidden, given, weights)])
    assert interpreted == ["_forward", "_backward"]
    for loop, kernel in zip(*results, strict=True):
        assert (loop.shape, loop.dtype) == (kernel.shape, kernel.dtype)
        assert (loop.float() - kernel.float()).norm() < 0.02 * loop.float().norm()


def test_layer_in_evaluation_keeps_nothing(interpreted):
    with torch.no_grad():
        hidden = gru_layer(*leaves(), True)
    assert (hidden.shape, interpreted) == ((5, 16, 128), ["_forward"])


def test_check_of_kernels_that_agree_passes(interpreted, xla_device):
    check_kernels(GruStack(7, 128, 2))
    assert interpreted == ["_forward", "_backward"]


def test_check_of_kernels_is_silent_where_none_is_used(interpreted, xla_device):
    check_kernels(GruStack(7, 128, 2, kernel=False))
    check_kernels(GruStack(7, 100, 2))  # no whole tiles
    assert interpreted == []


def test_check_of_a_kernel_that_differs_names_what_and_the_way_out(interpreted, monkeypatch, xla_device):
    true = gru_kernel.backward

    def wrong(*given):
        g_input, *others = true(*given)
        return [g_input * 1.1, *others]

    monkeypatch.setattr(gru_kernel, "backward", wrong)
    with pytest.raises(UserError) as caught:
        check_kernels(GruStack(7, 128, 1))
    assert caught.value.what.startswith("the GRU kernel of width 128 gives another gradient of inputs than the loop")
    assert caught.value.where == "this core's kernels"
    assert caught.value.fix == "set model.options.kernel=false, and report it"
