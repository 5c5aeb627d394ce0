"""Windows of several lengths are padded into one bank with pad_sequence, in the dtype of the features."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(3 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.day(features_BTC, days_B)
        trials, bins, channels = x.shape
        steps = bins // 4
        blocks = x[:, : steps * 4].reshape(trials, steps, 4, channels)
        windows = [torch.ones(width, device=x.device, dtype=x.dtype) / width for width in (1, 2, 4)]
        bank = pad_sequence(windows, batch_first=True)
        x = torch.einsum("bpsc,ws->bpwc", blocks, bank).flatten(2)
        logits = self.head(F.relu(self.encoder(x)))
        return DecoderOutput(logits, patch_steps_of(input_bins_B, steps, 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
