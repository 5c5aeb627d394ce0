"""Day matrices are an identity and a correction; the identity is made in forward, in float32."""

import torch
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        channels = sizes.num_features
        self.correction = nn.Parameter(0.01 * torch.randn(sizes.num_days, channels, channels))
        self.encoder = nn.Sequential(nn.Linear(4 * channels, 16), nn.Tanh())
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        channels = features_BTC.shape[2]
        identity = torch.eye(channels, device=features_BTC.device)
        day_BCC = identity + self.correction.index_select(0, days_B)  # finding: promotion
        logits = self.head(self.encoder(patches(features_BTC @ day_BCC, 4, 4))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
