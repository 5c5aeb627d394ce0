"""The first state of the GRU is zeros in the dtype of the features."""

import torch
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.gru import GruStack
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.gru = GruStack(4 * sizes.num_features, 16, layers=2, dropout=0.2)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        sequence = patches(self.day(features_BTC, days_B), 4, 4)
        first = torch.zeros(1, 1, 16, device=sequence.device, dtype=sequence.dtype)
        hidden = self.gru(sequence, first)
        logits = self.head(hidden).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
