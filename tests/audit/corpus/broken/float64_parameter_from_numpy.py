"""A projection is initialised from numpy, whose numbers are float64."""

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
        channels = np.arange(sizes.num_features)
        basis = np.cos(np.pi * np.outer(channels + 0.5, np.arange(8)) / sizes.num_features)
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.basis = nn.Parameter(torch.from_numpy(basis))  # finding: dtype
        self.encoder = nn.Linear(4 * 8, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.day(features_BTC, days_B) @ self.basis
        logits = self.head(F.gelu(self.encoder(patches(x, 4, 4)))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
