"""Each trial is normalised in float32 and the parts are put together again with pad_sequence."""

import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_offset = nn.Embedding(sizes.num_days, sizes.num_features)
        self.encoder = nn.Linear(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        parts = []
        for trial in features_BTC.unbind(0):
            wide = trial.float()
            parts.append((wide - wide.mean(dim=0)) / (wide.std(dim=0) + 1e-3))
        x = pad_sequence(parts, batch_first=True)
        x = x + self.day_offset(days_B).unsqueeze(1)  # finding: promotion
        logits = self.head(F.relu(self.encoder(patches(x, 4, 4)))).transpose(0, 1)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
