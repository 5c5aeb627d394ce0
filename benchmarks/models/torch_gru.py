"""The published baseline as torch_xla's users write it: torch.nn.GRU, which torch_xla replaces by a scan of its own.

What plan-memory says about it is the reason for models/gru.py:

    xla_b2t plan-memory --bins 1000 --config configs/gru_baseline.toml --set train.batch_size=64 \
        --set model.factory=benchmarks/models/torch_gru.py:build
"""

import torch_xla  # noqa: F401  puts its own GRU in the place of torch.nn.GRU
from torch import Tensor, nn

from xla_b2t.models.gru_decoder import GruDecoder, GruDecoderOptions


class TorchGru(nn.Module):
    """Takes the place of `models.gru.GruStack`."""

    def __init__(self, inputs: int, hidden: int, layers: int, dropout: float):
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, layers, dropout=dropout)

    def forward(self, sequence_PBF: Tensor, initial_LBH: Tensor) -> Tensor:
        """(P, B, H) from (P, B, F) and the first state of every layer, one row of which stands for all."""
        initial_LBH = initial_LBH.expand(self.gru.num_layers, sequence_PBF.shape[1], -1).contiguous()
        return self.gru(sequence_PBF, initial_LBH)[0]


def build(sizes, options):
    """A factory: `model.factory=benchmarks/models/torch_gru.py:build`."""
    record = GruDecoderOptions(**options)
    model = GruDecoder(sizes, record)
    inputs = record.patch_bins * sizes.num_features
    model.gru = TorchGru(inputs, record.hidden, record.layers, record.dropout)
    return model
