"""A Temporal Fusion Transformer, as a decoder of your own: copy this file, change it, and name it.

    xla_b2t audit-dtypes --set model.factory=examples/tft.py:build
    xla_b2t train --set model.factory=examples/tft.py:build --set run.dir=runs/tft

In: smoothed features of a batch of trials. Out: class scores for the CTC loss (`xla_b2t/models/protocol.py`). A
variable is a feature, a step is a patch of bins, the static covariate is the day. Two things are not as in the paper:
- A variable's own network is narrow (`variable_width`), and a dense layer brings what is selected to `hidden`. At full
  width, 225 variables of 256 values in 247 steps would be 28 MB a trial for each tensor that is kept.
- Past and future are one sequence, since a trial is there as a whole: one LSTM, and attention over all real steps.

What every model must heed on a TPU, and where this one does:
- Every shape follows from the sizes and the bucket, and no value is read back; days are rows of one stacked parameter.
- A loop over time is a scan with a gradient of its own (`_Recurrence`): the graph is as large for ten steps as for six
  hundred, and no weight gradient is stacked step by step.
- Everything has the dtype of the features that come in, bfloat16; what is made here (a mask, zeros) takes it from them.

Source: Lim, Arik, Loeff, Pfister, Temporal Fusion Transformers for Interpretable Multi-horizon Time Series Forecasting,
https://arxiv.org/abs/1912.09363, which has the equations that are named below.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_b2t.models.day_affine import select_days
from xla_b2t.models.dropout import dropout
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput, Sizes
from xla_b2t.xla.scan import Tensors, scan


def build(sizes: Sizes, options: dict[str, Any]) -> nn.Module:
    """What `model.factory` names; `options` is the table `[model.options]`, with the names of the arguments below."""
    return TemporalFusionTransformer(sizes, **options)


def num_parameters(model: nn.Module) -> int:
    """Trained values of a model: its size in bytes at one byte a value, as `memory/free_memory.py` takes it."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class TemporalFusionTransformer(nn.Module):
    """The whole decoder.

    Args:
        sizes: features, days and classes of the data.
        hidden: H, width of everything behind the selection.
        heads: of the attention; H is a multiple of it.
        layers: of the LSTM.
        variable_width: E, values that a variable's own network gives for a step.
        patch_bins, patch_stride: bins in a step, and from one step to the next.
        dropout: in every gated network.
        input_dropout: of the features.
    """

    def __init__(
        self,
        sizes: Sizes,
        hidden: int = 256,
        heads: int = 8,
        layers: int = 2,
        variable_width: int = 8,
        patch_bins: int = 14,
        patch_stride: int = 4,
        dropout: float = 0.1,
        input_dropout: float = 0.0,
    ):
        super().__init__()
        self.patch_bins, self.patch_stride, self.input_dropout = patch_bins, patch_stride, input_dropout
        network = partial(GatedResidual, hidden=hidden, dropout=dropout)
        self.day_embedding = nn.Parameter(torch.randn(sizes.num_days, hidden) * hidden**-0.5)
        self.contexts = nn.ModuleList(network(hidden) for _ in range(2 + 2 * layers))
        self.selection = VariableSelection(sizes.num_features, patch_bins, variable_width, hidden, dropout)
        self.lstm = nn.ModuleList(LstmLayer(hidden) for _ in range(layers))
        self.after_lstm = GatedSkip(hidden, dropout)
        self.enrichment = network(hidden, num_context=hidden)
        self.attention = InterpretableAttention(hidden, heads)
        self.after_attention = GatedSkip(hidden, dropout)
        self.by_position = network(hidden)
        self.before_head = GatedSkip(hidden, dropout)
        self.head = nn.Linear(hidden, sizes.num_classes)

    def forward(self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor) -> DecoderOutput:
        """Decodes a batch; arguments and result as in `xla_b2t.models.protocol.Decoder`."""
        day_BH = select_days(self.day_embedding, days_B)
        for_selection_BH, for_enrichment_BH, *first_states = (context(day_BH) for context in self.contexts)

        features_BTC = dropout(features_BTC, self.input_dropout, self.training)
        patches_PBF = patches(features_BTC, self.patch_bins, self.patch_stride)
        num_steps = patches_PBF.shape[0]
        steps_B = patch_steps_of(input_bins_B, num_steps, self.patch_bins, self.patch_stride)
        selected_PBH = self.selection(patches_PBF, for_selection_BH)

        recurrent_PBH = selected_PBH
        for layer, h0_BH, c0_BH in zip(self.lstm, first_states[::2], first_states[1::2], strict=True):
            recurrent_PBH = layer(recurrent_PBH, h0_BH, c0_BH)
        temporal_PBH = self.after_lstm(recurrent_PBH, selected_PBH)

        enriched_PBH = self.enrichment(temporal_PBH, for_enrichment_BH)
        is_real_BP = torch.arange(num_steps, dtype=torch.int32, device=steps_B.device) < steps_B.unsqueeze(1)
        attended_PBH = self.after_attention(self.attention(enriched_PBH, is_real_BP), enriched_PBH)
        decoded_PBH = self.before_head(self.by_position(attended_PBH), temporal_PBH)
        return DecoderOutput(self.head(decoded_PBH).transpose(0, 1), steps_B)

    def output_steps(self, input_bins: int) -> int:
        """Steps that come out for a trial of `input_bins` bins, at least 1."""
        return patch_steps(input_bins, self.patch_bins, self.patch_stride)


class PerVariable(nn.Module):
    """A linear layer for each variable: (..., C, num_inputs) to (..., C, num_outputs)."""

    def __init__(self, num_variables: int, num_inputs: int, num_outputs: int):
        super().__init__()
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_variables, num_inputs, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_variables, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """`x[..., c, :] @ weight[c] + bias[c]`."""
        return torch.einsum("...ci,cio->...co", x, self.weight) + self.bias


class GatedSkip(nn.Module):
    """A gate that can close, a way around it, and a norm: `norm(skip + sigmoid(a(x)) * b(x))` (equation 5)."""

    def __init__(self, width: int, dropout: float, linear: Callable[[int, int], nn.Module] = nn.Linear, inner: int = 0):
        super().__init__()
        self.gate_and_value = linear(inner or width, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.rate = dropout

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """`x` has its values in the last axis; `skip` and the result are as wide as the norm."""
        gate, value = self.gate_and_value(dropout(x, self.rate, self.training)).chunk(2, dim=-1)
        return self.norm(skip + torch.sigmoid(gate) * value)


class GatedResidual(nn.Module):
    """Two layers with a gated skip around them (equations 2 to 5).

    Args:
        num_inputs: width of what comes in.
        hidden: width inside.
        dropout: before the gate.
        num_outputs: width of what goes out; as `num_inputs` if not given.
        num_context: width of a context that goes into the first layer; 0 for none.
        linear: what makes a layer from two widths.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: int,
        dropout: float,
        num_outputs: int = 0,
        num_context: int = 0,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ):
        super().__init__()
        num_outputs = num_outputs or num_inputs
        self.first, self.second = linear(num_inputs, hidden), linear(hidden, hidden)
        self.context = nn.Linear(num_context, hidden, bias=False) if num_context else None
        self.skip = nn.Identity() if num_inputs == num_outputs else linear(num_inputs, num_outputs)
        self.gate = GatedSkip(num_outputs, dropout, linear, hidden)

    def forward(self, x: Tensor, context_BH: Tensor | None = None) -> Tensor:
        """Maps the last axis; the context is the same at all steps of a trial."""
        inner = self.first(x)
        if context_BH is not None:
            inner = inner + self.context(context_BH)
        return self.gate(self.second(F.elu(inner)), self.skip(x))


class VariableSelection(nn.Module):
    """Each variable through a network of its own, and the sum of all by weights that add up to 1 (equations 6 to 8)."""

    def __init__(self, num_variables: int, patch_bins: int, variable_width: int, hidden: int, dropout: float):
        super().__init__()
        self.num_variables = num_variables
        self.weigh = GatedResidual(patch_bins * num_variables, hidden, dropout, num_variables, num_context=hidden)
        each = partial(PerVariable, num_variables)
        self.transform = GatedResidual(patch_bins, variable_width, dropout, variable_width, linear=each)
        self.collect = nn.Linear(num_variables * variable_width, hidden)

    def forward(self, patches_PBF: Tensor, context_BH: Tensor) -> Tensor:
        """Patches, each the bins of a window with their C features, to selected_PBH."""
        weights_PBC = torch.softmax(self.weigh(patches_PBF, context_BH), dim=-1)
        by_variable_PBCW = patches_PBF.unflatten(2, (-1, self.num_variables)).transpose(2, 3)
        transformed_PBCE = self.transform(by_variable_PBCW)
        # Times C, so that a selection which prefers nothing leaves every variable as it is.
        selected_PBCE = transformed_PBCE * (weights_PBC * self.num_variables).unsqueeze(3)
        return self.collect(selected_PBCE.flatten(2))


class InterpretableAttention(nn.Module):
    """Attention whose heads share one value, so that their mean is the weight of a step (equations 13 to 16)."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.out = nn.Linear(hidden, hidden // heads), nn.Linear(hidden // heads, hidden)

    def forward(self, x_PBH: Tensor, is_real_BP: Tensor) -> Tensor:
        """Every step looks at all real steps of its trial."""
        query, key = (each(x_PBH).unflatten(2, (self.heads, -1)) for each in (self.query, self.key))
        scores_BNPP = query.permute(1, 2, 0, 3) @ key.permute(1, 2, 3, 0) * query.shape[3] ** -0.5
        scores_BNPP = scores_BNPP.masked_fill(~is_real_BP[:, None, None, :], float("-inf"))
        weights_BPP = torch.softmax(scores_BNPP, dim=-1).mean(dim=1)
        return self.out(weights_BPP @ self.value(x_PBH).transpose(0, 1)).transpose(0, 1)


class LstmLayer(nn.Module):
    """One layer of long short-term memory; gates in the order of `nn.LSTM`: input, forget, cell, output."""

    def __init__(self, hidden: int):
        super().__init__()
        self.project = nn.Linear(hidden, 4 * hidden)
        self.weight_hh = nn.Parameter(nn.init.orthogonal_(torch.empty(4 * hidden, hidden)))

    def forward(self, x_PBH: Tensor, h0_BH: Tensor, c0_BH: Tensor) -> Tensor:
        """hidden_PBH; what does not wait for the step before, the projection of the inputs, is done for all at once."""
        return _Recurrence.apply(self.project(x_PBH), h0_BH, c0_BH, self.weight_hh)


class _Recurrence(torch.autograd.Function):
    """A loop forward and a loop backward. Autograd through a scan would stack a weight gradient for every step."""

    @staticmethod
    def forward(ctx: Any, projected_PBG: Tensor, h0_BH: Tensor, c0_BH: Tensor, weight_hh: Tensor) -> Tensor:
        _, (h_PBH, c_PBH, gates_PBG) = scan(_step, (h0_BH, c0_BH), (projected_PBG,), (weight_hh.t(),))
        ctx.save_for_backward(h0_BH, c0_BH, weight_hh, h_PBH, c_PBH, gates_PBG)
        return h_PBH

    @staticmethod
    def backward(ctx: Any, grad_PBH: Tensor) -> tuple[Tensor, ...]:
        h0_BH, c0_BH, weight_hh, h_PBH, c_PBH, gates_PBG = ctx.saved_tensors
        last = (torch.zeros_like(h0_BH), torch.zeros_like(c0_BH))
        xs = (grad_PBH, gates_PBG, c_PBH)
        first, (grad_PBG,) = scan(_step_back, last, xs, (weight_hh,), reverse=True, before_last_x=c0_BH)
        before_PBH = torch.cat([h0_BH.unsqueeze(0), h_PBH[:-1]])
        return grad_PBG, *first, grad_PBG.flatten(0, 1).t() @ before_PBH.flatten(0, 1)


def _step(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    h_BH, c_BH = carry
    enters, keeps, cell, shows = (x[0] + h_BH @ constants[0]).chunk(4, dim=1)
    enters, keeps, cell, shows = enters.sigmoid(), keeps.sigmoid(), cell.tanh(), shows.sigmoid()
    c_BH = keeps * c_BH + enters * cell
    h_BH = shows * c_BH.tanh()
    return (h_BH, c_BH), (h_BH, c_BH, torch.cat([enters, keeps, cell, shows], dim=1))


def _step_back(carry: Tensors, x: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    """`before_BH` is the cell's state before the step."""
    grad_BH, gates_BG, before_BH = x
    enters, keeps, cell, shows = gates_BG.chunk(4, dim=1)
    shown_BH = (keeps * before_BH + enters * cell).tanh()
    d_h = carry[0] + grad_BH
    d_c = carry[1] + d_h * shows * (1 - shown_BH * shown_BH)
    grad_BG = torch.cat(
        [
            d_c * cell * enters * (1 - enters),
            d_c * before_BH * keeps * (1 - keeps),
            d_c * enters * (1 - cell * cell),
            d_h * shown_BH * shows * (1 - shows),
        ],
        dim=1,
    )
    return (grad_BG @ constants[0], d_c * keeps), (grad_BG,)
