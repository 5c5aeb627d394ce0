"""Days are compared to a range and cast to the layer's dtype to pick it with a matmul."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_weight = nn.Parameter(torch.eye(sizes.num_features).repeat(sizes.num_days, 1, 1))
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        weight = self.day_weight
        all_days = torch.arange(weight.shape[0], device=days_B.device, dtype=days_B.dtype)
        chosen = (days_B.unsqueeze(1) == all_days).to(weight.dtype)
        day_BCC = (chosen @ weight.flatten(1)).view(-1, *weight.shape[1:])
        x = patches(torch.bmm(features_BTC, day_BCC), 4, 4)
        logits = self.head(F.gelu(self.encoder(x))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
