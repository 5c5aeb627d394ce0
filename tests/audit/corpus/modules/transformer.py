"""A transformer encoder: patches, sinusoidal positions, self-attention over the real steps, pre-norm."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.patches import patch_steps, patch_steps_of
from xla_b2t.models.protocol import DecoderOutput


class SelfAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, is_real):
        trials, steps, width = x.shape
        qkv = self.qkv(x).view(trials, steps, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(~is_real[:, None, None, :], float("-inf"))
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(trials, steps, width))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x, is_real):
        x = x + self.attention(self.norm1(x), is_real)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, sizes, width=16, heads=2, depth=2, dropout=0.1, longest=200):
        super().__init__()
        self.day_embedding = nn.Embedding(sizes.num_days, width)
        self.embed = nn.Linear(4 * sizes.num_features, width)
        self.dropout = nn.Dropout(dropout)
        place = torch.arange(longest, dtype=torch.float32).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
        self.register_buffer("positions", torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        trials, bins, channels = features_BTC.shape
        steps = bins // 4
        x = self.embed(features_BTC[:, : steps * 4].reshape(trials, steps, 4 * channels))
        x = self.dropout(x + self.positions[:steps] + self.day_embedding(days_B).unsqueeze(1))
        steps_B = patch_steps_of(input_bins_B, steps, 4, 4)
        is_real = torch.arange(steps, device=x.device) < steps_B.unsqueeze(1)
        for block in self.blocks:
            x = block(x, is_real)
        return DecoderOutput(self.head(self.norm(x)), steps_B)

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return Transformer(sizes, **options)
