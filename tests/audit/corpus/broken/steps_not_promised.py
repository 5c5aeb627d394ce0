"""The padding of the convolution gives a step more than output_steps says."""

import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.conv = nn.Conv1d(sizes.num_features, 16, kernel_size=4, stride=4, padding=2)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):  # finding: protocol
        x = F.gelu(self.conv(self.day(features_BTC, days_B).transpose(1, 2))).transpose(1, 2)
        logits = self.head(x)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
