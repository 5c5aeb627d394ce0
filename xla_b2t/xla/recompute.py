"""Values that a backward pass works out again instead of keeping.

The compiler finds equal expressions and computes them once, which would keep the first result alive after all. What
goes through `again` is new to it.
"""

import torch


def again(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same values, from which the compiler does not recognise what was computed before; no gradient."""
    if tensors[0].device.type != "xla":
        return tensors
    import torch_xla.core.xla_model as xm

    fresh = [tensor.detach().clone() for tensor in tensors]
    xm.optimization_barrier_(fresh)
    return tuple(fresh)
