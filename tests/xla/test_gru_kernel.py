import numpy as np
import pytest
import torch

from xla_b2t.models.gru import gru_layer
from xla_b2t.xla import gru_kernel

jax = pytest.importorskip("jax", reason="kernels need JAX, which has wheels for CPython 3.11 and 3.12")


def inputs(steps: int, trials: int, hidden: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(scale).bfloat16()

    return {
        "projected": draw(steps, trials, 3 * hidden, scale=1.0),
        "first": draw(trials, hidden, scale=0.5),
        "w_hh": draw(3 * hidden, hidden, scale=hidden**-0.5),
        "bias": draw(hidden, scale=0.2),
        "grad": draw(steps, trials, hidden, scale=1.0),
    }


def to_jax(tensor: torch.Tensor):
    import jax.numpy as jnp

    array = jnp.asarray(tensor.detach().float().numpy())
    return array.astype(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else array


def to_torch(array) -> torch.Tensor:
    return torch.from_numpy(np.array(array.astype("float32")))


def reference(values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A layer in float64 whose input projection is the identity, so that its gradients are the kernels'."""
    width = values["projected"].shape[2]
    wide = {name: value.double().requires_grad_() for name, value in values.items() if name != "grad"}
    bias = torch.cat([torch.zeros(2 * width // 3, dtype=torch.float64), wide["bias"]])
    eye, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    hidden = gru_layer(wide["projected"], wide["first"], eye, wide["w_hh"], zero, bias)
    hidden.backward(values["grad"].double())
    return hidden.detach(), {name: value.grad for name, value in wide.items()}


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-2) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize(("steps", "trials"), [(1, 8), (7, 16)])
def test_kernels_interpreted_equal_the_layer_in_float64(steps, trials):
    values = inputs(steps, trials, hidden=128)
    size = 128
    expected, gradients = reference(values)
    arrays = {name: to_jax(value) for name, value in values.items()}

    hidden, kept = gru_kernel._forward(
        arrays["projected"], arrays["first"], arrays["w_hh"].T, arrays["bias"][None], keep=True, interpret=True
    )
    g_input, g_last, g_first, sums = gru_kernel._backward(
        arrays["grad"], hidden, arrays["first"], kept, arrays["w_hh"], interpret=True
    )

    assert_near(to_torch(hidden), expected)
    assert_near(to_torch(g_input), gradients["projected"])
    assert_near(to_torch(g_first), gradients["first"])
    previous = torch.cat([values["first"][None].double(), expected[:-1]]).flatten(0, 1)
    products = torch.cat([to_torch(g_input)[:, :, : 2 * size], to_torch(g_last)], dim=2).double().flatten(0, 1)
    assert_near(products.t() @ previous, gradients["w_hh"])
    assert_near(to_torch(sums).sum(0)[: 3 * size], gradients["projected"].sum((0, 1)))
    assert_near(to_torch(sums).sum(0)[3 * size :], gradients["bias"])


def test_kernel_that_keeps_nothing_gives_the_same_states():
    arrays = {name: to_jax(value) for name, value in inputs(3, 8, hidden=128).items()}
    given = (arrays["projected"], arrays["first"], arrays["w_hh"].T, arrays["bias"][None])
    kept = gru_kernel._forward(*given, keep=True, interpret=True)[0]
    (alone,) = gru_kernel._forward(*given, keep=False, interpret=True)
    assert (kept == alone).all()
