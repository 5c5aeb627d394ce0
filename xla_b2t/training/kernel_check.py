"""Kernels against loops, on the core that will rely on them.

The kernels cannot be run where they are developed. So no run relies on them before they have shown, on the device that
it has, that they compute what the loop computes.
"""

import torch
from torch import nn

from xla_b2t.errors import UserError
from xla_b2t.models.gru import GruStack, gru_layer
from xla_b2t.xla import gru_kernel
from xla_b2t.xla.compile_guard import may_compile
from xla_b2t.xla.device import sync, to_device, to_host

_STEPS = 3
_TOLERANCE = 0.03
"""Relative, of whole tensors: bfloat16 keeps 8 bits, and the loop rounds more often than the kernel."""


def check_kernels(model: nn.Module, dtype: torch.dtype, trials: int, trains: bool) -> list[int]:
    """Runs each kernel that the model will use against the loop on a few random numbers.

    Args:
        model: any decoder.
        dtype: what it computes in.
        trials: of a batch on this core.
        trains: whether gradients will be taken.

    Returns:
        The hidden widths that are run as kernels.

    Raises:
        UserError: they differ, or the kernel does not compile.
    """
    widths = sorted({part.hidden for part in model.modules() if isinstance(part, GruStack) and part.kernel})
    used = [width for width in widths if gru_kernel.fits(trials, width, dtype)]
    for width in used:
        _check(width, dtype, trials, trains)
    return used


def turn_off_kernels(model: nn.Module) -> None:
    """Lets every recurrent layer run as a loop, wherever it runs."""
    for part in model.modules():
        if isinstance(part, GruStack):
            part.kernel = False


def _check(width: int, dtype: torch.dtype, trials: int, trains: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    shapes = ((_STEPS, trials, width), (trials, width), *((3 * width, width),) * 2, *((3 * width,),) * 2)
    host = [(torch.randn(shape, generator=generator) * width**-0.5).to(dtype) for shape in shapes]
    (weights,) = to_device([torch.randn(shapes[0], generator=generator).to(dtype)])
    leaves = [leaf.requires_grad_(trains) for leaf in to_device(host)]
    with may_compile():
        try:
            loop, kernel = (to_host(_results(leaves, weights, uses_kernel)) for uses_kernel in (False, True))
        except RuntimeError as error:
            raise UserError(f"the GRU kernel of width {width} does not run: {error}", _WHERE, _FIX) from error
    names = ["output", *(f"gradient {i} of {len(leaves)}" for i in range(len(leaves)))]
    for name, expected, found in zip(names, loop, kernel, strict=False):
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not error <= _TOLERANCE:
            raise UserError(
                f"the GRU kernel of width {width} gives another {name} than the loop; "
                f"they differ by {error:.3g}, at most {_TOLERANCE} is rounding",
                _WHERE,
                _FIX,
            )


_WHERE = "this core's kernels"
_FIX = "set model.options.kernel=false (evaluate: --no-kernel), and report it"


def _results(leaves: list[torch.Tensor], weights: torch.Tensor, uses_kernel: bool) -> list[torch.Tensor]:
    output_PBH = gru_layer(*leaves, uses_kernel)
    trains = leaves[0].requires_grad
    results = [output_PBH.detach(), *(torch.autograd.grad(output_PBH, leaves, weights) if trains else ())]
    sync()
    return results
