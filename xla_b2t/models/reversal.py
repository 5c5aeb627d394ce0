"""Gradient reversal: the identity forward, a gradient of the opposite sign backward.

What stands behind it learns to do its task, and what stands before it learns to make that task impossible.

Source: Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation (2015), sections 3.1 and 4.
"""

import math
from typing import Any

import torch
from torch import Tensor


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: Tensor) -> Tensor:
        ctx.save_for_backward(strength)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (strength,) = ctx.saved_tensors
        return -(grad * strength.to(grad.dtype)), None


def reverse_gradient(x: Tensor, strength: Tensor) -> Tensor:
    """`x`, whose gradient comes back times minus `strength`.

    Args:
        x: any floating dtype, which its gradient has too.
        strength: without axes, any floating dtype; a tensor, so that another value is not another graph.
    """
    assert strength.dim() == 0, f"the strength has the shape {tuple(strength.shape)}"
    return _ReverseGradient.apply(x, strength)


def ramp(step: int, warmup_steps: int, ramp_steps: int) -> float:
    """The usual rise of the strength, 2 / (1 + exp(-10 p)) - 1 with p from 0 to 1: fast at first, 0.9999 at the end.

    Args:
        step: the update, from 0.
        warmup_steps: updates at 0 before the rise, so that the networks know something before they contend.
        ramp_steps: updates of the rise; 0 jumps to the end.
    """
    if step < warmup_steps:
        return 0.0
    share = min(1.0, (step - warmup_steps) / ramp_steps) if ramp_steps else 1.0
    return 2 / (1 + math.exp(-10 * share)) - 1
