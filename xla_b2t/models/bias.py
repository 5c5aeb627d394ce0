"""Adding a bias whose gradient is summed in float32.

Left to autograd, the gradient of a bfloat16 bias is a bfloat16 running sum over all trials and steps; such a sum stops
growing after a few hundred terms.
"""

from typing import Any

import torch
from torch import Tensor


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, sum_rows(grad).to(ctx.dtype)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """`x + bias`, with bias of shape (features,) on the last axis of x, same dtype."""
    return _AddBias.apply(x, bias)


def sum_rows(x: Tensor) -> Tensor:
    """Sum over every axis but the last, accumulated and returned in float32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.sum(dim=tuple(range(x.dim() - 1)), dtype=wide)
