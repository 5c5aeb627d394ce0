"""The recurrence of a GRU layer as two TPU kernels in Pallas: the weights stay on the chip for all steps.

A loop of XLA operations reads the recurrent weights from HBM at every step and starts a handful of fusions for a few
rows of work. Here a step is one run of the kernel's grid: the matmul, the gates and their derivatives are scheduled
together, while the next step's inputs arrive and the last one's outputs leave. `models/gru.py` has the same mathematics
as a loop, for every other device and size.

Values in HBM are bfloat16; the state and the gradient that are handed on from step to step, the gates and the sums of
gradients are float32 on the chip.
"""

from typing import Any

import torch

from xla_b2t.xla import tpu_kernel
from xla_b2t.xla.target import FEWEST_ROWS, device_kind

_LANES = 128
_ROWS = 8
_VMEM_BYTES = {"TPU v5 lite": 100 * 2**20, "TPU v6 lite": 100 * 2**20, "TPU v5": 48 * 2**20}
"""What a kernel may use of a core's VMEM, by kind of device. Older ones have too little, and no bfloat16 in Pallas."""


def fits(trials: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take a layer of this size, on the kind of device that will run it.

    They want bfloat16, whole tiles, weights and blocks in VMEM, and JAX.
    """
    whole_tiles = hidden % _LANES == 0 and trials % _ROWS == 0
    if dtype != torch.bfloat16 or not whole_tiles or not tpu_kernel.can_write():
        return False
    return _vmem_bytes(trials, hidden) <= _VMEM_BYTES.get(device_kind(), 0)


def _vmem_bytes(trials: int, hidden: int) -> int:
    """Two buffers of the weights; two of a step's 12 rows in and out in bfloat16, and about as much in float32.

    What a kernel may use is kept from the rest of the program for as long as it runs, so it is asked for sparingly.
    """
    return 2 * 2 * 3 * hidden * hidden + trials * hidden * (2 * 2 * 12 + 4 * 14)


def forward(
    projected_PBG: torch.Tensor, first_BH: torch.Tensor, w_HG: torch.Tensor, b_new_H: torch.Tensor, keep: bool
) -> list[torch.Tensor]:
    """All steps forward.

    Args:
        projected_PBG: inputs times weights, with all biases but the recurrent one of `new`; gates reset, update, new.
        first_BH: the state before the first step.
        w_HG: recurrent weights, transposed.
        b_new_H: the recurrent bias of `new`.
        keep: whether a backward pass will follow.

    Returns:
        hidden_PBH; and with `keep`, kept_PBI, where I is 4 H: reset, update, new, and the recurrent part of `new`.
    """
    return tpu_kernel.call(_forward, [projected_PBG, first_BH, w_HG, b_new_H.unsqueeze(0)], keep=keep)


def backward(
    grad_PBH: torch.Tensor,
    hidden_PBH: torch.Tensor,
    first_BH: torch.Tensor,
    kept_PBI: torch.Tensor,
    w_GH: torch.Tensor,
) -> list[torch.Tensor]:
    """All steps backward.

    Args:
        grad_PBH: gradient of the loss with respect to hidden_PBH.
        hidden_PBH, kept_PBI: from `forward`.
        first_BH: as in `forward`.
        w_GH: recurrent weights.

    Returns:
        The gradients with respect to projected_PBG; to the recurrent products of `new`, (P, B, H); to first_BH,
        float32; and (8, 4 H) float32, whose column sums are the sums of the first two over steps and trials.
    """
    return tpu_kernel.call(_backward, [grad_PBH, hidden_PBH, first_BH, kept_PBI, w_GH])


def _cost(*arrays: Any, steps: int, trials: int, hidden: int) -> Any:
    """For scheduler and prediction: the arrays pass through HBM once, a state takes three rows of products."""
    from jax.experimental import pallas as pl

    states = steps * trials * hidden
    moved = sum(array.size * array.dtype.itemsize for array in arrays)
    flops = 6 * steps * max(trials, FEWEST_ROWS) * hidden * hidden
    return pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=3 * states)


def _forward(x: Any, first: Any, weights: Any, bias: Any, keep: bool, interpret: bool = False) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    steps, trials, width = x.shape
    size = width // 3

    def kernel(x_ref, first_ref, w_ref, bias_ref, h_ref, *refs):
        carry_ref = refs[-1]

        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = first_ref[...].astype(jnp.float32)

        h = carry_ref[...]
        recurrent = jnp.dot(h.astype(w_ref.dtype), w_ref[...], preferred_element_type=jnp.float32)
        projected = x_ref[0].astype(jnp.float32)
        reset = jax.nn.sigmoid(projected[:, :size] + recurrent[:, :size])
        update = jax.nn.sigmoid(projected[:, size : 2 * size] + recurrent[:, size : 2 * size])
        recurrent_new = recurrent[:, 2 * size :] + bias_ref[...].astype(jnp.float32)
        new = jnp.tanh(projected[:, 2 * size :] + reset * recurrent_new)
        if keep:
            for place, value in enumerate((reset, update, new, recurrent_new)):
                refs[0][0, :, place * size : (place + 1) * size] = value.astype(x.dtype)
        h = new + update * (h - new)
        h_ref[0] = h.astype(x.dtype)
        carry_ref[...] = h

    by_step, fixed = (lambda t: (t, 0, 0)), (lambda t: (0, 0))
    widths = (size, 4 * size) if keep else (size,)
    outputs = [jax.ShapeDtypeStruct((steps, trials, wide), x.dtype) for wide in widths]
    return pl.pallas_call(
        kernel,
        grid=(steps,),
        in_specs=[
            pl.BlockSpec((1, trials, width), by_step),
            *(pl.BlockSpec(array.shape, fixed) for array in (first, weights, bias)),
        ],
        out_specs=[pl.BlockSpec((1, trials, wide), by_step) for wide in widths],
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((trials, size), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_vmem_bytes(trials, size)),
        cost_estimate=_cost(x, first, weights, *outputs, steps=steps, trials=trials, hidden=size),
        name="gru_forward",
        interpret=interpret,
    )(x, first, weights, bias)


def _backward(grad: Any, hidden: Any, first: Any, kept: Any, weights: Any, interpret: bool = False) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    steps, trials, size = grad.shape

    def kernel(grad_ref, previous_ref, first_ref, kept_ref, w_ref, in_ref, last_ref, first_out_ref, sum_ref, carry_ref):
        turn = pl.program_id(0)

        @pl.when(turn == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)
            sum_ref[...] = jnp.zeros_like(sum_ref)

        g = carry_ref[...] + grad_ref[0].astype(jnp.float32)
        values = [kept_ref[0, :, i * size : (i + 1) * size].astype(jnp.float32) for i in range(4)]
        reset, update, new, recurrent_new = values
        first, before = first_ref[...].astype(jnp.float32), previous_ref[0].astype(jnp.float32)
        previous = jnp.where(turn == steps - 1, first, before)
        g_new = g * (1 - update) * (1 - new * new)
        g_update = g * (previous - new) * update * (1 - update)
        g_reset = g_new * recurrent_new * reset * (1 - reset)
        g_last = g_new * reset
        for place, value in enumerate((g_reset, g_update, g_new)):
            in_ref[0, :, place * size : (place + 1) * size] = value.astype(grad.dtype)
        last_ref[0] = g_last.astype(grad.dtype)
        rows = jnp.concatenate([g_reset, g_update, g_new, g_last], axis=1)
        sum_ref[...] += rows.reshape(-1, _ROWS, 4 * size).sum(axis=0)
        products = jnp.concatenate([g_reset, g_update, g_last], axis=1).astype(grad.dtype)
        carry_ref[...] = g * update + jnp.dot(products, w_ref[...], preferred_element_type=jnp.float32)

        @pl.when(turn == steps - 1)
        def _():
            first_out_ref[...] = carry_ref[...]

    back, fixed = (lambda t: (steps - 1 - t, 0, 0)), (lambda t: (0, 0))

    def before(t):
        return (jnp.maximum(steps - 2 - t, 0), 0, 0)

    outputs = [
        jax.ShapeDtypeStruct((steps, trials, 3 * size), grad.dtype),
        jax.ShapeDtypeStruct(grad.shape, grad.dtype),
        jax.ShapeDtypeStruct((trials, size), jnp.float32),
        jax.ShapeDtypeStruct((_ROWS, 4 * size), jnp.float32),
    ]
    return pl.pallas_call(
        kernel,
        grid=(steps,),
        in_specs=[
            pl.BlockSpec((1, trials, size), back),
            pl.BlockSpec((1, trials, size), before),
            pl.BlockSpec(first.shape, fixed),
            pl.BlockSpec((1, trials, 4 * size), back),
            pl.BlockSpec(weights.shape, fixed),
        ],
        out_specs=[
            pl.BlockSpec((1, trials, 3 * size), back),
            pl.BlockSpec((1, trials, size), back),
            pl.BlockSpec((trials, size), fixed),
            pl.BlockSpec((_ROWS, 4 * size), fixed),
        ],
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((trials, size), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_vmem_bytes(trials, size)),
        cost_estimate=_cost(grad, hidden, kept, weights, *outputs, steps=steps, trials=trials, hidden=size),
        name="gru_backward",
        interpret=interpret,
    )(grad, hidden, first, kept, weights)
