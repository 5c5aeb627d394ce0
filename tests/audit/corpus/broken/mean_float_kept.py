"""The mean over a trial is taken in float32 and subtracted as it is."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_offset = nn.Embedding(sizes.num_days, 16)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        mean = features_BTC.mean(dim=1, keepdim=True, dtype=torch.float32)  # finding: cast
        x = self.encoder(patches(features_BTC - mean, 4, 4))
        logits = self.head(F.relu(x) + self.day_offset(days_B)).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
