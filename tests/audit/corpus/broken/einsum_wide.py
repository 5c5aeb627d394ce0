"""A cosine transform of the channels, a float32 matrix made in forward, enters an einsum with bfloat16."""

import math

import torch
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * 8, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.day(features_BTC, days_B)
        channel = torch.arange(x.shape[2], dtype=torch.float32, device=x.device)
        order = torch.arange(8, dtype=torch.float32, device=x.device)
        basis = torch.cos(math.pi / x.shape[2] * torch.outer(channel + 0.5, order))
        x = torch.einsum("btc,co->bto", x, basis)  # finding: promotion
        logits = self.head(torch.tanh(self.encoder(patches(x, 4, 4)))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
