"""Proof that all ranks hold the same weights.

Ranks that start from different weights train on without a word, each its own model, so it is checked at the start and
after every resume.
"""

import zlib

import numpy as np
import torch

from xla_b2t.xla.world import World


def check_same_weights(weights: dict[str, torch.Tensor], world: World) -> None:
    """Compares a checksum of every weight over all ranks.

    Args:
        weights: this rank's, on the host, by name.
        world: all ranks must call this together.

    Raises:
        RuntimeError: names the first parameter that differs and the ranks that differ from rank 0.
    """
    names = list(weights)
    # A checksum has 32 bits and a float32 counts to 2**24: it travels in halves.
    halves_RN2 = np.zeros((world.size, len(names), 2))
    for column, name in enumerate(names):
        checksum = zlib.crc32(weights[name].contiguous().numpy())
        halves_RN2[world.rank, column] = divmod(checksum, 1 << 16)
    all_RN2 = world.sum(halves_RN2.reshape(-1)).reshape(halves_RN2.shape)
    differs_RN = (all_RN2 != all_RN2[0]).any(axis=-1)
    if differs_RN.any():
        first = names[int(differs_RN.any(axis=0).argmax())]
        ranks = np.flatnonzero(differs_RN.any(axis=1)).tolist()
        raise RuntimeError(f"ranks {ranks} hold other weights than rank 0; the first that differs is {first}")
