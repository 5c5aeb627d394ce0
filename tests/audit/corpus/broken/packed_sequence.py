"""The sequence is packed for the GRU, which needs the lengths on the host."""

from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.gru = nn.GRU(4 * sizes.num_features, 16)
        self.head = nn.Linear(16, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = patches(self.day(features_BTC, days_B), 4, 4)
        steps_B = patch_steps_of(input_bins_B, x.shape[0], 4, 4)
        lengths = steps_B.cpu()  # finding: host-read
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)  # finding: host-fallback
        hidden, _ = pad_packed_sequence(self.gru(packed)[0], total_length=x.shape[0])
        return DecoderOutput(self.head(hidden).transpose(0, 1), steps_B)

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Decoder(sizes)
