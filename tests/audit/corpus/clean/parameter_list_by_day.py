"""Day layers are stacked in one parameter and picked with index_select."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_weights = nn.Parameter(torch.stack([torch.eye(sizes.num_features) for _ in range(sizes.num_days)]))
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        weights = self.day_weights.index_select(0, days_B)
        x = patches(torch.einsum("btc,bcd->btd", features_BTC, weights), 4, 4)
        logits = self.head(F.softsign(self.encoder(x))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
