"""One first state a layer, in a ParameterList."""

import torch
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes, depth=2):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.cells = nn.ModuleList(nn.Linear(32, 16) for _ in range(depth))
        self.states = nn.ParameterList(nn.Parameter(torch.zeros(1, 16)) for _ in range(depth))
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.encoder(patches(self.day(features_BTC, days_B), 4, 4))
        for cell, state in zip(self.cells, self.states):
            before = torch.cat([state.expand(1, x.shape[1], -1), x[:-1]])
            x = torch.tanh(cell(torch.cat([x, before], dim=2)))
        logits = self.head(x).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
