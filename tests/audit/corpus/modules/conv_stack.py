"""A stack of dilated convolutions with group norm, GELU and residuals, after a strided one."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of
from xla_b2t.models.protocol import DecoderOutput


class ResidualBlock(nn.Module):
    def __init__(self, channels, dilation, dropout):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, kernel_size=3, padding=dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(channels, channels, kernel_size=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.dropout = nn.Dropout1d(dropout)

    def forward(self, x):
        y = self.conv1(F.gelu(self.norm1(x)))
        y = self.conv2(self.dropout(F.gelu(self.norm2(y))))
        return x + y


class ConvStack(nn.Module):
    def __init__(self, sizes, channels=16, dilations=(1, 2, 4), dropout=0.1):
        super().__init__()
        self.day_weight = nn.Parameter(torch.eye(sizes.num_features).repeat(sizes.num_days, 1, 1))
        self.day_bias = nn.Parameter(torch.zeros(sizes.num_days, 1, sizes.num_features))
        self.stem = nn.Conv1d(sizes.num_features, channels, kernel_size=4, stride=4)
        self.blocks = nn.Sequential(*[ResidualBlock(channels, dilation, dropout) for dilation in dilations])
        self.head = nn.Conv1d(channels, sizes.num_classes, kernel_size=1)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, features_BTC, input_bins_B, days_B):
        weight, bias = self.day_weight.index_select(0, days_B), self.day_bias.index_select(0, days_B)
        x = F.softsign(torch.baddbmm(bias, features_BTC, weight))
        bins = torch.arange(x.shape[1], device=x.device)
        x = x * (bins < input_bins_B.unsqueeze(1)).unsqueeze(2)
        x = self.blocks(self.stem(x.transpose(1, 2)))
        logits = self.head(x).transpose(1, 2)
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return ConvStack(sizes, **options)
