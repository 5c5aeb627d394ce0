"""A stack of GRU layers as two scans: one forward over time, one backward with a hand-written gradient.

In: a sequence with its steps first, and first hidden states. Out: the hidden states of the last layer. Parameters have
the names, shapes and gate order (reset, update, new) of `torch.nn.GRU`, so published weights load as they are.

What differs from autograd through a scan, and why:
- Everything that does not depend on the previous step is one matmul or one fused pass over all steps, outside the
  loops: the input projection, the gates' derivatives, every weight gradient. Autograd through a scan stacks one weight
  gradient a time step, gigabytes at real sizes.
- Given the gates, the gradient's recursion is linear in the incoming gradient. So the derivatives are worked out before
  the backward loop, which is left with a product, a matmul and a sum.
- bfloat16 in gives bfloat16 throughout; matmuls over time and trials accumulate in float32 inside the matrix unit, and
  biases and a shared first state are summed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from xla_b2t.models.bias import sum_rows
from xla_b2t.models.dropout import dropout
from xla_b2t.xla.scan import Tensors, scan


class GruStack(nn.Module):
    """Layers of gated recurrent units with dropout between them (not after the last).

    Args:
        num_inputs: width of the sequence that comes in.
        hidden: H, width of every layer.
        layers: how many.
        dropout: probability that a value between two layers is dropped in training.
    """

    def __init__(self, num_inputs: int, hidden: int, layers: int, dropout: float = 0.0):
        super().__init__()
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
        """
        dtypes = {inputs_PBF.dtype, initial_LBH.dtype, *(parameter.dtype for parameter in self.parameters())}
        assert len(dtypes) == 1, f"sequence, first states and weights are of several dtypes: {dtypes}"
        sequence = inputs_PBF
        for layer in range(self.layers):
            if layer > 0:
                sequence = dropout(sequence, self.dropout, self.training)
            initial_BH = initial_LBH[layer] if initial_LBH.shape[0] > 1 else initial_LBH.squeeze(0)
            weights = (getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            sequence = gru_layer(sequence, initial_BH, *weights)
        return sequence


def gru_layer(
    inputs_PBF: Tensor, initial_BH: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
    """One layer.

    Args:
        inputs_PBF: the sequence, steps first.
        initial_BH: first hidden state; one row stands for every trial.
        weight_ih, weight_hh, bias_ih, bias_hh: (3H, F), (3H, H), (3H,), (3H,); gates in the order reset, update, new.

    Returns:
        hidden_PBH.
    """
    return _GruLayer.apply(inputs_PBF, initial_BH, weight_ih, weight_hh, bias_ih, bias_hh)


class _GruLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PBF: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        hidden = w_hh.shape[1]
        # The recurrent biases of reset and update only ever appear in a sum with the input's: added once, outside.
        bias = b_ih + torch.cat([b_hh[: 2 * hidden], torch.zeros_like(b_hh[2 * hidden :])])
        projected_PBG = x_PBF @ w_ih.t() + bias
        first_BH = h0.expand(x_PBF.shape[1], hidden)
        constants = (w_hh.t(), b_hh[2 * hidden :])
        if not any(ctx.needs_input_grad):
            _, (h_PBH,) = scan(_step, (first_BH,), (projected_PBG,), constants)
            return h_PBH
        _, (h_PBH, gates_PBG, recurrent_PBH) = scan(_step_saving, (first_BH,), (projected_PBG,), constants)
        ctx.save_for_backward(x_PBF, h0, w_ih, w_hh, h_PBH, gates_PBG, recurrent_PBH)
        return h_PBH

    @staticmethod
    def backward(ctx: Any, grad_PBH: Tensor) -> tuple[Tensor | None, ...]:
        x_PBF, h0, w_ih, w_hh, h_PBH, gates_PBG, recurrent_PBH = ctx.saved_tensors
        previous_PBH = torch.cat([h0.expand(1, *h_PBH.shape[1:]), h_PBH[:-1]])
        size = h_PBH.shape[2]
        reset, update, new = gates_PBG[:, :, :size], gates_PBG[:, :, size : 2 * size], gates_PBG[:, :, 2 * size :]
        # Derivatives of the new state with respect to the gates' arguments. That of `new` is what the input projection
        # sees; the recurrent one sees it through the reset gate.
        d_new = (1 - update) * (1 - new * new)
        d_update = (previous_PBH - new) * update * (1 - update)
        d_reset = d_new * recurrent_PBH * reset * (1 - reset)
        slopes_PBG = torch.cat([d_reset, d_update, d_new * reset], dim=2)
        first = torch.zeros_like(h_PBH[0])
        (d_h0_BH,), (g_PBH,) = scan(_step_back, (first,), (grad_PBH, update, slopes_PBG), (w_hh,), reverse=True)
        # From here on nothing is sequential.
        g_recurrent_PBG = torch.cat([g_PBH, g_PBH, g_PBH], dim=2) * slopes_PBG
        g_input_PBG = torch.cat([g_recurrent_PBG[:, :, : 2 * size], g_PBH * d_new], dim=2)
        d_x = g_input_PBG @ w_ih if ctx.needs_input_grad[0] else None
        d_h0 = d_h0_BH if h0.shape[0] == d_h0_BH.shape[0] else sum_rows(d_h0_BH).to(h0.dtype).unsqueeze(0)
        d_w_ih = g_input_PBG.flatten(0, 1).t() @ x_PBF.flatten(0, 1)
        d_w_hh = g_recurrent_PBG.flatten(0, 1).t() @ previous_PBH.flatten(0, 1)
        d_b_ih = sum_rows(g_input_PBG).to(w_ih.dtype)
        d_b_hh = sum_rows(g_recurrent_PBG).to(w_hh.dtype)
        return d_x, d_h0, d_w_ih, d_w_hh, d_b_ih, d_b_hh


def _cell(h_BH: Tensor, x_BG: Tensor, w_HG: Tensor, b_new_H: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One step: the next state, the three gates, and the recurrent part of `new` before the reset gate."""
    size = h_BH.shape[1]
    recurrent_BG = h_BH @ w_HG
    both = torch.sigmoid(x_BG[:, : 2 * size] + recurrent_BG[:, : 2 * size])
    reset, update = both[:, :size], both[:, size:]
    recurrent_new = recurrent_BG[:, 2 * size :] + b_new_H
    new = torch.tanh(x_BG[:, 2 * size :] + reset * recurrent_new)
    return new + update * (h_BH - new), reset, update, new, recurrent_new


def _step(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    h_BH = _cell(carry[0], x[0], *constants)[0]
    return (h_BH,), (h_BH,)


def _step_saving(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    h_BH, reset, update, new, recurrent_new = _cell(carry[0], x[0], *constants)
    return (h_BH,), (h_BH, torch.cat([reset, update, new], dim=1), recurrent_new)


def _step_back(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    grad_BH, update, slopes_BG = x
    g_BH = carry[0] + grad_BH
    return (g_BH * update + torch.cat([g_BH, g_BH, g_BH], dim=1) * slopes_BG @ constants[0],), (g_BH,)
