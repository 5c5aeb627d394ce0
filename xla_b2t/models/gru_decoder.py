"""The published baseline decoder: day layer, patches, a stack of GRU layers, a linear head.

In: features, lengths, days. Out: class scores a step (`models/protocol.py`). At 512 features, 45 days and 41 classes it
has 44,315,177 parameters. Initialised as there: identity day layers, orthogonal recurrent weights, Xavier elsewhere.
"""

import msgspec
import torch
from torch import Tensor, nn

from xla_b2t.models.bias import add_bias
from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.dropout import dropout
from xla_b2t.models.gru import GruStack
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput, Sizes


class GruDecoderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[model.options]` of `gru_decoder`."""

    patch_bins: int = 14
    patch_stride: int = 4
    hidden: int = 768
    layers: int = 5
    dropout: float = 0.4
    """Between the recurrent layers."""
    input_dropout: float = 0.2
    """After the day layer."""
    recompute: bool = False
    """Less memory for more time: the recurrent layers' gates are worked out again in the backward pass."""
    kernel: bool = True
    """On a TPU, run the recurrence as a kernel that keeps its weights on the chip, where they fit."""


class GruDecoder(nn.Module):
    """See the module's docstring; it keeps `models.protocol.Decoder`."""

    def __init__(self, sizes: Sizes, options: GruDecoderOptions):
        super().__init__()
        self.options = options
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.gru = GruStack(
            options.patch_bins * sizes.num_features,
            options.hidden,
            options.layers,
            options.dropout,
            options.recompute,
            options.kernel,
        )
        self.out = nn.Linear(options.hidden, sizes.num_classes)
        self.h0 = nn.Parameter(torch.empty(1, 1, options.hidden))
        for name, parameter in self.gru.named_parameters():
            if name.startswith("weight_hh"):
                nn.init.orthogonal_(parameter)
            elif name.startswith("weight_ih"):
                nn.init.xavier_uniform_(parameter)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.xavier_uniform_(self.h0)

    def forward(self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor) -> DecoderOutput:
        """Decodes a batch; arguments and result as in `models.protocol.Decoder`."""
        options = self.options
        mapped_BTC = self.day(features_BTC, days_B)
        mapped_BTC = dropout(mapped_BTC, options.input_dropout, self.training)
        sequence_PBF = patches(mapped_BTC, options.patch_bins, options.patch_stride)
        hidden_PBH = self.gru(sequence_PBF, self.h0)
        logits_PBK = add_bias(hidden_PBH @ self.out.weight.t(), self.out.bias)
        steps_B = patch_steps_of(input_bins_B, logits_PBK.shape[0], options.patch_bins, options.patch_stride)
        return DecoderOutput(logits_PBK.transpose(0, 1), steps_B)

    def output_steps(self, input_bins: int) -> int:
        """Steps that come out for a trial of `input_bins` bins, at least 1."""
        return patch_steps(input_bins, self.options.patch_bins, self.options.patch_stride)
