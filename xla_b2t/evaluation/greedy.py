"""Greedy CTC decoding on the host.

In: the most probable class of every step. Out: phoneme sequences. Taking the arg max is left to the core.
"""

import numpy as np

from xla_b2t.data.phonemes import BLANK


def collapse(ids_BP: np.ndarray, steps_B: np.ndarray) -> list[list[int]]:
    """Drops repeats, then blanks.

    Args:
        ids_BP: integer class of every step.
        steps_B: integer number of steps that count, 0 to P; what stands behind them is ignored.

    Returns:
        One list of class ids a trial, without blanks.
    """
    decoded = []
    for ids_P, steps in zip(ids_BP, steps_B, strict=True):
        ids = ids_P[:steps]
        starts = np.ones(len(ids), dtype=bool)
        starts[1:] = ids[1:] != ids[:-1]
        decoded.append(ids[starts & (ids != BLANK)].tolist())
    return decoded
