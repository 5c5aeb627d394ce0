"""The published baseline decoder: day layer, patches, a stack of GRU layers, a linear head.

In: features, lengths, days. Out: class scores a step (`models/protocol.py`). At 512 features, 45 days and 41 classes it
has 44,315,177 parameters. Initialised as there: identity day layers, orthogonal recurrent weights, Xavier elsewhere.
"""

from typing import Annotated

from msgspec import Meta
from torch import Tensor, nn

from xla_b2t.config import AtLeastOne, Record
from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.dropout import dropout
from xla_b2t.models.gru import GruStack
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput, Sizes
from xla_b2t.models.recognizer import class_scores, first_state, initialise

DropoutRate = Annotated[float, Meta(ge=0, le=0.99)]


class GruDecoderOptions(Record):
    """`[model.options]` of `gru_decoder`."""

    patch_bins: AtLeastOne = 14
    patch_stride: AtLeastOne = 4
    hidden: AtLeastOne = 768
    layers: AtLeastOne = 5
    dropout: DropoutRate = 0.4
    """Between the recurrent layers."""
    input_dropout: DropoutRate = 0.2
    """After the day layer."""
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
            options.kernel,
        )
        self.out = nn.Linear(options.hidden, sizes.num_classes)
        initialise(self.gru, self.out)
        self.h0 = first_state(options.hidden)

    def forward(self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor) -> DecoderOutput:
        """Decodes a batch; arguments and result as in `models.protocol.Decoder`."""
        options = self.options
        mapped_BTC = self.day(features_BTC, days_B)
        mapped_BTC = dropout(mapped_BTC, options.input_dropout, self.training)
        sequence_PBF = patches(mapped_BTC, options.patch_bins, options.patch_stride)
        logits_BPK = class_scores(self.gru, self.h0, self.out, sequence_PBF)
        steps_B = patch_steps_of(input_bins_B, sequence_PBF.shape[0], options.patch_bins, options.patch_stride)
        return DecoderOutput(logits_BPK, steps_B)

    def output_steps(self, input_bins: int) -> int:
        """Steps that come out for a trial of `input_bins` bins, at least 1."""
        return patch_steps(input_bins, self.options.patch_bins, self.options.patch_stride)
