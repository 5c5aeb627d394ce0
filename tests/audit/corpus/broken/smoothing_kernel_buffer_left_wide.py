"""The buffer of smoothing taps is registered after .bfloat16(), so it stays float32."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.num_features = sizes.num_features
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.day_scale = nn.Embedding(sizes.num_days, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def set_smoothing(self, sigma=1.5):
        taps = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / sigma) ** 2)
        taps = (taps / taps.sum()).repeat(self.num_features, 1, 1)
        self.register_buffer("taps", taps)  # finding: dtype

    def forward(self, features_BTC, input_bins_B, days_B):
        x = F.conv1d(features_BTC.transpose(1, 2), self.taps, padding=4, groups=self.num_features).transpose(1, 2)
        x = torch.tanh(self.encoder(patches(x, 4, 4)).transpose(0, 1))
        logits = self.head(x * (1 + self.day_scale(days_B).unsqueeze(1)))
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    model = Decoder(sizes).bfloat16()
    model.set_smoothing()
    return model
