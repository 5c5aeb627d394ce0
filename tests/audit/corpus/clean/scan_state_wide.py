"""A running mean of the features is scanned from a state of their own dtype."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput
from xla_b2t.xla.scan import scan


def follow(carry, x, constants):
    (level,), (rate,) = carry, constants
    level = level + rate * (x[0] - level)
    return (level,), (level,)


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.register_buffer("rate", torch.full((sizes.num_features,), 0.05))
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        features_TBC = features_BTC.transpose(0, 1)
        start_BC = torch.zeros_like(features_TBC[0])
        _, (level_TBC,) = scan(follow, (start_BC,), (features_TBC,), (self.rate,))
        x = features_BTC - level_TBC.transpose(0, 1)
        logits = self.head(F.gelu(self.encoder(patches(self.day(x, days_B), 4, 4)))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
