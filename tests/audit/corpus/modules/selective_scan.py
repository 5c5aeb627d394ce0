"""A Mamba-like block: gated selective state space, its recurrence written out over the steps in float32."""

import torch
import torch.nn.functional as F
from torch import nn

from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import DecoderOutput


class SelectiveScan(nn.Module):
    def __init__(self, width, states=4, rank=2):
        super().__init__()
        self.states, self.rank = states, rank
        self.project = nn.Linear(width, rank + 2 * states, bias=False)
        self.step_size = nn.Linear(rank, width)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, states + 1, dtype=torch.float32)).repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))

    def forward(self, x):
        delta, b, c = self.project(x).split([self.rank, self.states, self.states], dim=2)
        delta = F.softplus(self.step_size(delta).float())
        a = -torch.exp(self.A_log.float())
        decay = torch.exp(delta.unsqueeze(3) * a)
        drive = (delta * x.float()).unsqueeze(3) * b.float().unsqueeze(2)
        state = torch.zeros_like(drive[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + drive[:, step]
            states.append(state)
        y = (torch.stack(states, dim=1) * c.float().unsqueeze(2)).sum(dim=3)
        return (y + self.D.float() * x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, kernel=4, dropout=0.1):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.conv = nn.Conv1d(2 * width, 2 * width, kernel, padding=kernel - 1, groups=2 * width)
        self.scan = SelectiveScan(2 * width)
        self.project = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        inner, gate = self.expand(self.norm(x)).chunk(2, dim=-1)
        inner = self.conv(inner.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        inner = self.scan(F.silu(inner))
        return x + self.dropout(self.project(inner * F.silu(gate)))


class SelectiveDecoder(nn.Module):
    def __init__(self, sizes, width=8, depth=2):
        super().__init__()
        self.day = DayAffine(sizes.num_days, sizes.num_features)
        self.stem = nn.Linear(4 * sizes.num_features, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = self.stem(patches(self.day(features_BTC, days_B), 4, 4)).transpose(0, 1)
        logits = self.head(self.norm(self.blocks(x)))
        return DecoderOutput(logits, patch_steps_of(input_bins_B, logits.shape[1], 4, 4))

    def output_steps(self, input_bins):
        return patch_steps(input_bins, 4, 4)


def build(sizes, options):
    return SelectiveDecoder(sizes, **options)
