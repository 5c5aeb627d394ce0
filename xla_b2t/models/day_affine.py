"""The input layer of each recording day: an affine map and a softsign.

In: features and the day of each trial. Out: features of the same shape, brought into one space for all days.
All days are one stacked parameter: whatever days a batch holds, the graph is the same. An index out of range would be
clamped in silence on an XLA device, so the host must check it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from xla_b2t.errors import DtypeError
from xla_b2t.models.bias import sum_rows


class DayAffine(nn.Module):
    """`softsign(x @ day_weight[day] + day_bias[day])`, the identity before the softsign at first.

    Args:
        num_days: D.
        num_features: C.
    """

    def __init__(self, num_days: int, num_features: int):
        super().__init__()
        self.day_weight = nn.Parameter(torch.eye(num_features).repeat(num_days, 1, 1))
        self.day_bias = nn.Parameter(torch.zeros(num_days, num_features))

    def forward(self, features_BTC: Tensor, days_B: Tensor) -> Tensor:
        """Maps each trial by its day.

        Args:
            features_BTC: dtype of the parameters.
            days_B: int32, below D.

        Returns:
            A tensor like `features_BTC`.

        Raises:
            DtypeError: features and parameters are not of one dtype.
        """
        if features_BTC.dtype != self.day_weight.dtype:
            raise DtypeError(f"the features are {features_BTC.dtype}, the day layers are {self.day_weight.dtype}")
        weight_BCC = select_days(self.day_weight, days_B)
        bias_BC = select_days(self.day_bias, days_B)
        return softsign(add_day_bias(torch.bmm(features_BTC, weight_BCC), bias_BC))


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return x / (1 + x.abs())


class _SelectDays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stacked: Tensor, days_B: Tensor) -> Tensor:
        ctx.save_for_backward(days_B)
        ctx.shape = stacked.shape
        return stacked.index_select(0, days_B)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (days_B,) = ctx.saved_tensors
        # A scatter-add of whole matrices is serial on a TPU and, in bfloat16, rounds after each trial of a day. A
        # matmul with the (D, B) membership matrix does the same sum in the matrix unit, accumulated in float32.
        all_days = torch.arange(ctx.shape[0], device=grad.device, dtype=days_B.dtype)
        member_DB = (all_days.unsqueeze(1) == days_B.unsqueeze(0)).to(grad.dtype)
        return (member_DB @ grad.flatten(1)).view(ctx.shape), None


def select_days(stacked: Tensor, days_B: Tensor) -> Tensor:
    """Rows of a stacked parameter (D, ...) for each trial: (B, ...). The gradient is summed by day in float32."""
    return _SelectDays.apply(stacked, days_B)


class _AddDayBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, bias_BC: Tensor) -> Tensor:
        return x_BTC + bias_BC.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, Tensor]:
        return grad_BTC, sum_rows(grad_BTC.transpose(0, 1).flatten(1)).view_as(grad_BTC[:, 0]).to(grad_BTC.dtype)


def add_day_bias(x_BTC: Tensor, bias_BC: Tensor) -> Tensor:
    """Adds one bias to all bins of a trial; its gradient is summed over the bins in float32."""
    return _AddDayBias.apply(x_BTC, bias_BC)
