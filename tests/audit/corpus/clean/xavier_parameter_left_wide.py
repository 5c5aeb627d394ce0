"""The learned first state is drawn in the constructor and goes to bfloat16 with the rest."""

import torch
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.cell = nn.Linear(4 * sizes.num_features + 16, 16)
        self.head = nn.Linear(16, sizes.num_classes)
        self.h0 = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(1, 16)))
        self.bfloat16()

    def forward(self, features_BTC, input_bins_B, days_B):
        inputs = patches(self.day(features_BTC, days_B), 4, 4)
        hidden = self.h0.expand(inputs.shape[1], -1)
        outputs = []
        for step in range(inputs.shape[0]):
            hidden = torch.tanh(self.cell(torch.cat([inputs[step], hidden], dim=1)))
            outputs.append(hidden)
        logits = self.head(torch.stack(outputs, dim=1))
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
