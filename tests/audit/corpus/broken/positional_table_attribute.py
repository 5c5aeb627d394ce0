"""The positional table is a plain attribute: nobody moves it to the core or casts it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


def sinusoids(steps, width):
    angles = torch.arange(steps).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.positions = sinusoids(200, 16)  # finding: unregistered
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.encoder(patches(self.day(features_BTC, days_B), 4, 4)).transpose(0, 1)
        x = x + self.positions[: x.shape[1]]
        logits = self.head(x + F.gelu(self.mix(x)))
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
