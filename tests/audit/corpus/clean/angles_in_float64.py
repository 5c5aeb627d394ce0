"""Sinusoids are worked out in float32 and then brought back."""

import math

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
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = F.gelu(self.encoder(patches(self.day(features_BTC, days_B), 4, 4))).transpose(0, 1)
        _, steps, width = x.shape
        place = torch.arange(steps, dtype=torch.float32, device=x.device).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2, device=x.device) * (-math.log(1e4) / width))
        x = x + torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1).to(x.dtype)
        logits = self.head(x)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
