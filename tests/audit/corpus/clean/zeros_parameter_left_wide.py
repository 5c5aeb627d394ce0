"""The factory adds a day bias in the dtype of the model that it has already brought to bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.conv = nn.Conv1d(sizes.num_features, 16, kernel_size=4, stride=4)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        bias = self.day_bias.index_select(0, days_B)
        x = F.softsign(features_BTC + bias.unsqueeze(1))
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        steps = torch.arange(1, x.shape[1], dtype=torch.int32, device=x.device) * 4 + 4
        steps_B = (input_bins_B.unsqueeze(1) >= steps).sum(dim=1, dtype=torch.int32) + 1
        return DecoderOutput(self.head(x), steps_B)

    def output_steps(self, input_bins):
        return max(input_bins, 4) // 4


def build(sizes, options):
    model = Decoder(sizes).bfloat16()
    model.day_bias = nn.Parameter(torch.zeros(sizes.num_days, sizes.num_features, dtype=torch.bfloat16))
    return model
