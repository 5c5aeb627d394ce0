"""Noise in training is drawn with torch.randn, in float32."""

import torch
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes, noise=0.1):
        super().__init__()
        self.noise = noise
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Sequential(nn.Linear(4 * sizes.num_features, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.day(features_BTC, days_B)
        if self.training:
            x = x + self.noise * torch.randn(x.shape, device=x.device)  # finding: promotion
        logits = self.head(self.encoder(patches(x, 4, 4))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
