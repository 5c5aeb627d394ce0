"""One operation of a step that is being traced, as the rules see it, and how it is told of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The value is the operand's, seen differently or scaled: a sum is still the same sum.
SAME_VALUE = frozenset(
    ["view", "view_copy", "_unsafe_view", "reshape", "unsqueeze", "unsqueeze_copy", "squeeze", "squeeze_copy", "expand",
     "expand_copy", "detach", "detach_copy", "alias", "alias_copy", "clone", "transpose", "transpose_copy", "permute",
     "permute_copy", "t_copy", "neg", "mul", "div"]
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation of a traced step.

    Attributes:
        name: as ATen calls it, without the overload.
        args: what it was called with.
        inputs: the tensors among them.
        outputs: the tensors it gave.
        line: `file:line` of the Python statement, of the forward statement where it is a gradient.
        module: qualified name of the module it runs in; "" outside of the model.
        is_gradient: whether it is of the backward pass.
        call: number of the call of a torch function that it is a part of; 0 outside of any.
        at: its number in the step.
    """

    name: str
    args: Sequence[object]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    line: str
    module: str
    is_gradient: bool
    call: int
    at: int

    @property
    def title(self) -> str:
        """What it is called in a finding: the module it runs in, and its name."""
        gradient = "gradient of " if self.is_gradient else ""
        return gradient + ": ".join(part for part in (self.module, self.name.strip("_")) if part)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def described(tensor: Tensor) -> str:
    """The dtype and shape of a tensor."""
    return f"{dtype_name(tensor.dtype)} ({', '.join(map(str, tensor.shape))})"
