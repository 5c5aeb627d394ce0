"""A stack of GRU layers as two scans: one forward over time, one backward with a hand-written gradient.

In: a sequence with its steps first, and first hidden states. Out: the hidden states of the last layer. Parameters have
the names, shapes and gate order (reset, update, new) of `torch.nn.GRU`, so published weights load as they are.

What differs from autograd through a scan, and why:
- Every matmul that does not depend on the previous step is one over all steps, outside the loops: the input projection,
  every weight gradient. Autograd through a scan stacks one weight gradient a time step, gigabytes at real sizes.
- On a TPU the two loops are kernels that keep the recurrent weights on the chip (`xla/gru_kernel.py`), where they fit.
- What is kept for the backward pass is the state and four values a state. Working those out again, by two matmuls over
  all steps, takes more memory at its worst moment, and more time (docs/LOG.md).
- bfloat16 in gives bfloat16 out. Loops hand on states and gradients in bfloat16, kernels in float32. Matmuls over time
  and trials accumulate in float32 inside the matrix unit; biases and a shared first state are summed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from xla_b2t.errors import DtypeError
from xla_b2t.models.bias import sum_rows
from xla_b2t.models.dropout import dropout
from xla_b2t.xla import gru_kernel
from xla_b2t.xla.scan import Tensors, scan


class GruStack(nn.Module):
    """Layers of gated recurrent units with dropout between them (not after the last).

    Args:
        num_inputs: width of the sequence that comes in.
        hidden: H, width of every layer.
        layers: how many.
        dropout: probability that a value between two layers is dropped in training.
        kernel: on a TPU, use the kernels where they fit.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        kernel: bool = True,
    ):
        super().__init__()
        self.kernel = kernel
        self.hidden = hidden
        self.layers = layers
        self.dropout = dropout
        for layer in range(layers):
            width = num_inputs if layer == 0 else hidden
            shapes = {"weight_ih": (3 * hidden, width), "weight_hh": (3 * hidden, hidden)}
            shapes |= {"bias_ih": (3 * hidden,), "bias_hh": (3 * hidden,)}
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Biases and weights uniform within 1 / sqrt(hidden), as in `torch.nn.GRU`."""
        bound = self.hidden**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, inputs_PBF: Tensor, initial_LBH: Tensor) -> Tensor:
        """Runs all layers.

        Args:
            inputs_PBF: the sequence, steps first.
            initial_LBH: first hidden state of each layer, (L or 1, B or 1, H), where 1 is shared; same dtype.

        Returns:
            hidden_PBH, the last layer's hidden state after each step.

        Raises:
            DtypeError: sequence, first states and weights are not of one dtype.
        """
        weights = next(self.parameters()).dtype
        for what, tensor in (("the sequence", inputs_PBF), ("the first state", initial_LBH)):
            if tensor.dtype != weights:
                raise DtypeError(f"{what} is {tensor.dtype}, the weights of the recurrence are {weights}")
        sequence = inputs_PBF
        for layer in range(self.layers):
            if layer > 0:
                sequence = dropout(sequence, self.dropout, self.training)
            initial_BH = initial_LBH[layer] if initial_LBH.shape[0] > 1 else initial_LBH.squeeze(0)
            weights = (getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            sequence = gru_layer(sequence, initial_BH, *weights, self.kernel)
        return sequence


def gru_layer(
    inputs_PBF: Tensor,
    initial_BH: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    kernel: bool = True,
) -> Tensor:
    """One layer.

    Args:
        inputs_PBF: the sequence, steps first.
        initial_BH: first hidden state; one row stands for every trial.
        weight_ih, weight_hh, bias_ih, bias_hh: (3H, F), (3H, H), (3H,), (3H,); gates in the order reset, update, new.
        kernel: as in `GruStack`.

    Returns:
        hidden_PBH.
    """
    tensors = (inputs_PBF, initial_BH, weight_ih, weight_hh, bias_ih, bias_hh)
    # Asked here: within the function no gradient is ever wanted.
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    is_xla = inputs_PBF.device.type == "xla"
    uses_kernel = kernel and is_xla and gru_kernel.fits(inputs_PBF.shape[1], weight_hh.shape[1], inputs_PBF.dtype)
    return _GruLayer.apply(*tensors, uses_kernel, keep)


class _GruLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PBF: Tensor, h0: Tensor, *rest: Any) -> Tensor:
        w_ih, w_hh, b_ih, b_hh, ctx.kernel, keep = rest
        projected_PBG = _project(x_PBF, w_ih, b_ih, b_hh)
        size = w_hh.shape[1]
        first_BH = h0.expand(x_PBF.shape[1], size)
        constants = (w_hh.t(), b_hh[2 * size :])
        if ctx.kernel:
            h_PBH, *kept = gru_kernel.forward(projected_PBG, first_BH, *constants, keep=keep)
        else:
            _, (h_PBH, *kept) = scan(_step_keeping if keep else _step, (first_BH,), (projected_PBG,), constants)
        if keep:
            ctx.save_for_backward(x_PBF, h0, w_ih, w_hh, h_PBH, *kept)
        return h_PBH

    @staticmethod
    def backward(ctx: Any, grad_PBH: Tensor) -> tuple[Tensor | None, ...]:
        x_PBF, h0, w_ih, w_hh, h_PBH, kept_PBI = ctx.saved_tensors
        size = h_PBH.shape[2]
        first_BH = h0.expand(h_PBH.shape[1], size)
        if ctx.kernel:
            g_PBG, g_last_PBH, d_h0_BH, sums = gru_kernel.backward(grad_PBH, h_PBH, first_BH, kept_PBI, w_hh)
            sums_I = sum_rows(sums).to(w_hh.dtype)
        else:
            carry, xs = (torch.zeros_like(first_BH),), (grad_PBH, kept_PBI, h_PBH)
            (d_h0_BH,), (g_PBG, g_last_PBH) = scan(_step_back, carry, xs, (w_hh,), reverse=True, before_last_x=first_BH)
            sums_I = torch.cat([sum_rows(part).to(w_hh.dtype) for part in (g_PBG, g_last_PBH)])
        # From here on nothing is sequential.
        d_x = g_PBG @ w_ih if ctx.needs_input_grad[0] else None
        d_h0_BH = d_h0_BH if h0.shape[0] == d_h0_BH.shape[0] else sum_rows(d_h0_BH)
        d_w_ih = _outer(g_PBG, x_PBF)
        # The recurrent products of reset and update get the same gradient as the projected inputs.
        d_w_hh = torch.cat([_with_previous(part, h_PBH, first_BH) for part in (g_PBG[:, :, : 2 * size], g_last_PBH)])
        d_b_hh = torch.cat([sums_I[: 2 * size], sums_I[3 * size :]])
        return d_x, d_h0_BH.to(h0.dtype).view(h0.shape), d_w_ih, d_w_hh, sums_I[: 3 * size], d_b_hh, None, None


def _outer(left_PBM: Tensor, right_PBN: Tensor) -> Tensor:
    """(M, N): products summed over steps and trials."""
    return left_PBM.flatten(0, 1).t() @ right_PBN.flatten(0, 1)


def _with_previous(gradient_PBM: Tensor, h_PBH: Tensor, first_BH: Tensor) -> Tensor:
    """(M, H): as `_outer` with the state before each step, which is never laid out as a stack of its own."""
    return _outer(gradient_PBM[1:], h_PBH[:-1]) + gradient_PBM[0].t() @ first_BH


def _project(x_PBF: Tensor, w_ih: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """The input's part of all gates, at all steps.

    The recurrent biases of reset and update only ever appear in a sum with the input's: they are added here, once.
    """
    size = b_hh.shape[0] // 3
    return x_PBF @ w_ih.t() + (b_ih + torch.cat([b_hh[: 2 * size], torch.zeros_like(b_hh[2 * size :])]))


def _gates(projected: Tensor, recurrent: Tensor, b_new_H: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(..., 3H) twice to (..., H) four times: reset, update, new, and the recurrent part of `new` before the reset."""
    size = b_new_H.shape[0]
    both = torch.sigmoid(projected[..., : 2 * size] + recurrent[..., : 2 * size])
    reset, update = both[..., :size], both[..., size:]
    recurrent_new = recurrent[..., 2 * size :] + b_new_H
    return reset, update, torch.tanh(projected[..., 2 * size :] + reset * recurrent_new), recurrent_new


def _cell(h_BH: Tensor, x_BG: Tensor, w_HG: Tensor, b_new_H: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step: the next state, and the gates."""
    gates = _gates(x_BG, h_BH @ w_HG, b_new_H)
    _, update, new, _ = gates
    return new + update * (h_BH - new), gates


def _step(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    h_BH, _ = _cell(carry[0], x[0], *constants)
    return (h_BH,), (h_BH,)


def _step_keeping(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    h_BH, gates = _cell(carry[0], x[0], *constants)
    return (h_BH,), (h_BH, torch.cat(gates, dim=1))


def _step_back(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    """Gradients of a step: with respect to the projected inputs, and to the recurrent product of `new`."""
    grad_BH, kept_BI, previous_BH = x
    size = grad_BH.shape[1]
    reset, update, new, recurrent_new = (kept_BI[:, i * size : (i + 1) * size] for i in range(4))
    g_BH = carry[0] + grad_BH
    g_new = g_BH * (1 - update) * (1 - new * new)
    g_update = g_BH * (previous_BH - new) * update * (1 - update)
    g_reset = g_new * recurrent_new * reset * (1 - reset)
    g_last = g_new * reset
    back_BH = g_BH * update + torch.cat([g_reset, g_update, g_last], dim=1) @ constants[0]
    return (back_BH,), (torch.cat([g_reset, g_update, g_new], dim=1), g_last)
