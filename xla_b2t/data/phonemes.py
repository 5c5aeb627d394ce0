"""The 41 classes of the public brain-to-text data, and what CTC asks of a sequence of them.

In: nothing. Out: class numbers and names. Which words are made of which phonemes is left to `sentences`.
"""

import numpy as np

BLANK = 0
"""The class CTC emits between phonemes; it never occurs in a label."""

PHONEMES: tuple[str, ...] = (
    "BLANK",
    *(
        "AA",
        "AE",
        "AH",
        "AO",
        "AW",
        "AY",
        "B",
        "CH",
        "D",
        "DH",
        "EH",
        "ER",
        "EY",
        "F",
        "G",
        "HH",
        "IH",
        "IY",
        "JH",
        "K",
    ),
    *("L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH"),
    "SIL",
)
"""Name of each class: 0 blank, 1 to 39 ARPAbet without stress, 40 the silence after a word."""

SILENCE = PHONEMES.index("SIL")
NUM_CLASSES = len(PHONEMES)


def required_steps(labels_L: np.ndarray) -> int:
    """The fewest output steps in which CTC can spell a label: one each, and a blank between equal neighbours.

    Args:
        labels_L: integers (L,), without padding.

    Returns:
        L + the number of adjacent repeats; 0 for an empty label.
    """
    return int(len(labels_L) + np.count_nonzero(labels_L[1:] == labels_L[:-1]))
