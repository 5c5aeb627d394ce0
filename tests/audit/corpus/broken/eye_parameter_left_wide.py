"""The day matrices are set after the model went to bfloat16: torch.eye is float32."""

import torch
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.num_days, self.num_features = sizes.num_days, sizes.num_features
        self.encoder = nn.Sequential(nn.Linear(4 * sizes.num_features, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, sizes.num_classes)

    def add_day_layers(self):
        self.day_weight = nn.Parameter(torch.eye(self.num_features).repeat(self.num_days, 1, 1))  # finding: dtype

    def forward(self, features_BTC, input_bins_B, days_B):
        x = torch.bmm(features_BTC, self.day_weight.index_select(0, days_B))
        logits = self.head(self.encoder(patches(x, 4, 4))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    model = Decoder(sizes).bfloat16()
    model.add_day_layers()
    return model
