"""A spectrum is taken with numpy, which cannot have a tensor of the core."""

import numpy as np
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
        power = np.square(features_BTC.float().numpy()).mean(axis=1)  # finding: host-read
        scale = torch.from_numpy(1 / (1 + power)).to(features_BTC.device, features_BTC.dtype)
        x = self.day(features_BTC * scale.unsqueeze(1), days_B)
        x = F.gelu(self.encoder(patches(x, 4, 4)))
        logits = self.head(x).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
