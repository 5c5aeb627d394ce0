"""From a sequence to class scores: recurrent layers with a learned first state, and a linear head.

The functions take the parts, not a module that owns them, because the published checkpoints lay the parts down by name.
"""

import torch
from torch import Tensor, nn

from xla_b2t.models.bias import add_bias
from xla_b2t.models.gru import GruStack


def first_state(hidden: int) -> nn.Parameter:
    """A learned first hidden state, shared by all layers and trials: (1, 1, H), Xavier at first."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, 1, hidden)))


def initialise(gru: GruStack, out: nn.Linear) -> None:
    """Orthogonal recurrent weights and Xavier elsewhere, biases as they are: the published initialisation."""
    for name, parameter in gru.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
        elif name.startswith("weight_ih"):
            nn.init.xavier_uniform_(parameter)
    nn.init.xavier_uniform_(out.weight)


def class_scores(gru: GruStack, h0: Tensor, out: nn.Linear, sequence_PBF: Tensor) -> Tensor:
    """logits_BPK of a sequence with its steps first."""
    hidden_PBH = gru(sequence_PBF, h0)
    return add_bias(hidden_PBH @ out.weight.t(), out.bias).transpose(0, 1)
