"""Numbers that keep a graph narrow.

On an XLA tensor, `x < 0.5` compares in float64 and `n == 1` in int64, whatever the dtype of x and n: the number
decides. A tensor without axes of the same dtype does not.
"""

import torch
from torch import Tensor


def scalar_like(value: float, tensor: Tensor) -> Tensor:
    """`value` as a tensor without axes, with the dtype and device of `tensor`."""
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)
