"""Dropout whose scale fits the rate that the device really draws."""

import torch
from torch import Tensor

from xla_b2t.models.scalars import scalar_like

_LEVELS = 128


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Drops values at random and scales up the rest, so that the mean stays; x as it is when not training.

    `F.dropout` on a bfloat16 XLA tensor compares 7-bit random numbers with the rate and scales by the rate asked for,
    so that at 0.2 it keeps 0.805 and scales by 1 / 0.8. Here the rate is rounded to 1/128 and the scale belongs to the
    rounded rate. Seven bits a value are all the randomness that is needed: a quarter of the memory traffic.

    Args:
        x: any floating dtype; the result has it too.
        rate: probability that a value becomes 0, at least 0 and below 1.
        training: whether to drop at all.
    """
    kept = round((1 - rate) * _LEVELS)
    assert 0 < kept <= _LEVELS, f"a dropout rate of {rate} keeps nothing"
    if not training or kept == _LEVELS:
        return x
    draw = torch.rand(x.shape, dtype=torch.bfloat16, device=x.device)
    keep = draw < scalar_like(kept / _LEVELS, draw)
    return torch.where(keep, x * (_LEVELS / kept), torch.zeros_like(x))
