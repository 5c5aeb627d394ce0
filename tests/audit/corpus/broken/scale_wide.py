"""Units are weighted by a row that is made in forward, in float32."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_offset = nn.Embedding(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = features_BTC + self.day_offset(days_B).unsqueeze(1)
        x = F.gelu(self.encoder(patches(x, 4, 4)))
        scale = torch.linspace(0.5, 1.5, x.shape[2], device=x.device)
        x = x * scale  # finding: promotion
        logits = self.head(x).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
