"""Conformer blocks: half feed-forward, self-attention, gated depthwise convolution, half feed-forward."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class FeedForward(nn.Sequential):
    def __init__(self, width, dropout):
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x, is_real):
        trials, steps, width = x.shape
        x = self.norm(x)
        query, key, value = (
            layer(x).view(trials, steps, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        scores = torch.where(is_real[:, None, None, :], scores, torch.full_like(scores, -1e4))
        mixed = torch.softmax(scores, dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(trials, steps, width))


class Convolution(nn.Module):
    def __init__(self, width, kernel, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Conv1d(width, 2 * width, kernel_size=1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.group_norm = nn.GroupNorm(1, width)
        self.project = nn.Conv1d(width, width, kernel_size=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, is_real):
        x = self.norm(x).masked_fill(~is_real.unsqueeze(2), 0.0).transpose(1, 2)
        value, gate = self.expand(x).chunk(2, dim=1)
        x = value * torch.sigmoid(gate)
        x = F.silu(self.group_norm(self.depthwise(x)))
        return self.dropout(self.project(x)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width, heads, kernel, dropout):
        super().__init__()
        self.before, self.after = FeedForward(width, dropout), FeedForward(width, dropout)
        self.attention = Attention(width, heads)
        self.convolution = Convolution(width, kernel, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, is_real):
        x = x + 0.5 * self.before(x)
        x = x + self.attention(x, is_real)
        x = x + self.convolution(x, is_real)
        x = x + 0.5 * self.after(x)
        return self.norm(x)


class Conformer(nn.Module):
    def __init__(self, sizes, width=16, heads=2, depth=2, kernel=5, dropout=0.1):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.stem = nn.Linear(4 * sizes.num_features, width)
        self.blocks = nn.ModuleList(Block(width, heads, kernel, dropout) for _ in range(depth))
        self.head = nn.Linear(width, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.stem(patches(self.day(features_BTC, days_B), 4, 4)).transpose(0, 1)
        steps_B = patch_steps_of(input_bins_B, x.shape[1], 4, 4)
        is_real = torch.arange(x.shape[1], device=x.device) < steps_B.unsqueeze(1)
        for block in self.blocks:
            x = block(x, is_real)
        return DecoderOutput(self.head(x), steps_B)

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Conformer(sizes, **options)
