"""A gain is made anew in every forward pass, in float32: the optimizer never trains it."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.gain = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.encoder(patches(self.day(features_BTC, days_B), 4, 4))
        self.gain = nn.Parameter(torch.ones(16, device=x.device))  # finding: optimizer
        logits = self.head(F.gelu(x) * self.gain).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
