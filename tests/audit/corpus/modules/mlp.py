"""A perceptron over windows that overlap, with an offset a day, an early head and an activity penalty."""

from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput


class Mlp(nn.Module):
    def __init__(self, sizes, width=16, window=8, stride=4, dropout=0.2, penalty=1e-3):
        super().__init__()
        self.window, self.stride, self.penalty = window, stride, penalty
        self.day_scale = nn.Embedding(sizes.num_days, sizes.num_features)
        self.day_offset = nn.Embedding(sizes.num_days, sizes.num_features)
        self.first = nn.Linear(window * sizes.num_features, width)
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(width, sizes.num_classes)
        self.early = nn.Linear(width, sizes.num_classes)
        nn.init.ones_(self.day_scale.weight)
        nn.init.zeros_(self.day_offset.weight)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = features_BTC * self.day_scale(days_B).unsqueeze(1) + self.day_offset(days_B).unsqueeze(1)
        first = self.first(patches(x, self.window, self.stride)).transpose(0, 1)
        hidden = self.layers(first)
        activity_B = hidden.float().square().mean(dim=(1, 2))
        return DecoderOutput(
            self.head(hidden),
            patch_steps_of(input_bins_B, hidden.shape[1], self.window, self.stride),
            auxiliary_loss_B=self.penalty * activity_B,
            heads=(AuxiliaryHead("early", self.early(first), 0.3),),
        )

    def output_steps(self, input_bins):
        return patch_steps(input_bins, self.window, self.stride)


def build(sizes, options):
    return Mlp(sizes, **options)
