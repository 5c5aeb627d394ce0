"""The dtype policy: what every tensor of a training step is kept in, for the trainer and for the audit.

| tensors | dtype |
| --- | --- |
| parameters, buffers and features on the core, activations | `model.dtype`: bfloat16 |
| parameters and buffers whose name a pattern of `model.keep_float32` finds | float32 |
| master weights, moments, gradients once they are summed, running totals, what is scheduled | float32 |
| loss, log-softmax, the sums that a loss or a bias gradient is made of | float32 |
| labels, lengths, required steps, days | int32 |
| float64, float16 | nowhere |

A model may compute in float32 where it says so: an explicit cast that comes back by itself before the value meets
bfloat16, enters a matmul or leaves the model. What mixes the two by accident is a finding (`audit/promotions.py`).
"""

import re

import torch

from xla_b2t.config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""What a model may compute in, by the name in the configuration."""

STATE = torch.float32
"""Masters, moments, totals, and the numbers that travel to every update."""
COUNTS = torch.int32
"""Labels, lengths, days."""
FORBIDDEN = (torch.float64, torch.float16)
"""On a TPU the first is emulated, and the second overflows where bfloat16 does not."""


def kept_exception(name: str, config: ModelConfig) -> str:
    """The pattern of `model.keep_float32` that finds this name; "" when none does."""
    return next((pattern for pattern in config.keep_float32 if re.search(pattern, name)), "")


def kept_dtype(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.dtype:
    """What a parameter or buffer of the model is kept in on the core; integers stay as they are."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if kept_exception(name, config) else DTYPES[config.dtype]
