"""How a sentence moves the mouth: each phoneme has articulatory targets and a length, and a smooth path joins them.

In: the classes of a sentence, and a generator. Out: a trajectory in articulatory space, one row a bin.
What neurons make of it is left to `tuning`.
"""

import numpy as np

from xla_b2t.data.phonemes import PHONEMES, SILENCE

GESTURES = (
    *("speaking", "voiced", "nasal", "stopped", "hissing", "lateral", "curled", "lips_closed", "lips_rounded"),
    *("lip_to_teeth", "tip_to_teeth", "tip_to_ridge", "blade_to_palate", "back_to_velum", "breath"),
    *("tongue_high", "tongue_front", "tense", "jaw_open"),
)
"""Axes of articulatory space; each target is about -1 to 1, rest is 0."""

NUM_OWN = 6
"""Further axes on which each phoneme has a place of its own: what the gestures leave out."""

SPACE = len(GESTURES) + NUM_OWN

_CONSONANTS = {
    "P": "stopped lips_closed", "B": "voiced stopped lips_closed", "M": "voiced nasal lips_closed",
    "T": "stopped tip_to_ridge", "D": "voiced stopped tip_to_ridge", "N": "voiced nasal tip_to_ridge",
    "K": "stopped back_to_velum", "G": "voiced stopped back_to_velum", "NG": "voiced nasal back_to_velum",
    "F": "hissing lip_to_teeth", "V": "voiced hissing lip_to_teeth", "TH": "hissing tip_to_teeth",
    "DH": "voiced hissing tip_to_teeth", "S": "hissing tip_to_ridge", "Z": "voiced hissing tip_to_ridge",
    "SH": "hissing blade_to_palate", "ZH": "voiced hissing blade_to_palate", "HH": "breath",
    "CH": "stopped blade_to_palate > hissing blade_to_palate",
    "JH": "voiced stopped blade_to_palate > voiced hissing blade_to_palate",
    "L": "voiced lateral tip_to_ridge", "R": "voiced curled lips_rounded", "W": "voiced lips_rounded back_to_velum",
    "Y": "voiced blade_to_palate tongue_high",
}  # fmt: skip
_VOWELS = {
    # tongue high, tongue front, lips rounded, tense; the jaw opens as the tongue goes down
    "IY": (1.0, 1.0, 0, 1), "IH": (0.6, 0.7, 0, 0), "EH": (0.0, 0.7, 0, 0), "AE": (-0.7, 0.8, 0, 0),
    "AA": (-1.0, -0.6, 0, 1), "AO": (-0.5, -1.0, 0.7, 1), "UH": (0.6, -0.7, 0.6, 0), "UW": (1.0, -1.0, 1, 1),
    "AH": (-0.2, 0.0, 0, 0), "ER": (0.1, 0.0, 0.3, 1),
}  # fmt: skip
_GLIDES = {"EY": ("EH", "IY"), "AY": ("AA", "IY"), "OY": ("AO", "IY"), "AW": ("AA", "UW"), "OW": ("AO", "UW")}

_RELATIVE_LENGTH = {
    **dict.fromkeys(_GLIDES, 1.45), **dict.fromkeys(_VOWELS, 1.15), **dict.fromkeys(("AH", "IH", "UH"), 0.9),
    **dict.fromkeys(("F", "S", "SH", "TH", "CH", "JH"), 1.15), **dict.fromkeys(("V", "Z", "ZH"), 1.0),
    **dict.fromkeys(("P", "T", "K"), 0.9), **dict.fromkeys(("B", "D", "G", "DH", "HH"), 0.75),
    **dict.fromkeys(("M", "N", "NG", "L", "R", "W", "Y"), 0.85), "SIL": 0.75,
}  # fmt: skip
"""Length of each phoneme over the mean length, after what is common in read English."""

_LENGTH_SPREAD = 0.25
_RATE_SPREAD = 0.15
_SHORTEST_BINS = 2
_BLUR = 0.2
_OWN_SIZE = 0.5
_OWN_SEED = 39


def targets() -> np.ndarray:
    """Where each phoneme begins and ends, float32 (41, 2, SPACE); blank and silence are at rest."""
    targets_KEA = np.zeros((len(PHONEMES), 2, SPACE), np.float32)
    for name, moves in _CONSONANTS.items():
        begin, _, end = moves.partition(" > ")
        targets_KEA[PHONEMES.index(name)] = _gestures(begin), _gestures(end or begin)
    for name, vowel in _VOWELS.items():
        targets_KEA[PHONEMES.index(name)] = _vowel(*vowel)
    targets_KEA[PHONEMES.index("ER"), :, GESTURES.index("curled")] = 1
    for name, (begin, end) in _GLIDES.items():
        targets_KEA[PHONEMES.index(name)] = _vowel(*_VOWELS[begin]), _vowel(*_VOWELS[end])
    # The same for every seed: how English is spoken is no part of a simulated participant.
    own = np.random.Generator(np.random.Philox(_OWN_SEED)).standard_normal((len(PHONEMES), NUM_OWN))
    targets_KEA[1:SILENCE, :, len(GESTURES) :] = _OWN_SIZE * own[1:SILENCE, None]
    return targets_KEA


def trajectory(
    labels: tuple[int, ...], bins_per_phoneme: float, silence_bins: float, generator: np.random.Generator
) -> np.ndarray:
    """Speaks a sentence: draws the length of every phoneme, and moves smoothly from target to target.

    Neighbours blur into each other over about a fifth of a phoneme (co-articulation). Before the first phoneme and
    after the last there is silence.

    Args:
        labels: classes 1 to 40.
        bins_per_phoneme: mean length of a phoneme, bins.
        silence_bins: mean length of the silence at either end, bins.
        generator: for the lengths.

    Returns:
        float32 (T, SPACE).
    """
    targets_KEA = targets()
    rate = bins_per_phoneme * np.exp(_RATE_SPREAD * generator.standard_normal())
    spread = np.exp(_LENGTH_SPREAD * generator.standard_normal(len(labels)))
    relative = np.array([_RELATIVE_LENGTH[PHONEMES[label]] for label in labels])
    lengths = np.maximum(np.rint(rate * relative * spread), _SHORTEST_BINS).astype(int)
    before, after = np.rint(silence_bins * generator.uniform(0.5, 1.5, 2)).astype(int)
    pieces = [np.zeros((before, SPACE))]
    for label, length in zip(labels, lengths):
        share = (np.arange(length)[:, None] + 0.5) / length
        begin, end = targets_KEA[label]
        pieces.append((1 - share) * begin + share * end)
    pieces.append(np.zeros((after, SPACE)))
    return _blur(np.concatenate(pieces), _BLUR * bins_per_phoneme).astype(np.float32)


def _gestures(names: str) -> np.ndarray:
    target_A = np.zeros(SPACE)
    for name in ("speaking", *names.split()):
        target_A[GESTURES.index(name)] = 1
    return target_A


def _vowel(high: float, front: float, rounded: float, tense: float) -> np.ndarray:
    target_A = _gestures("voiced")
    target_A[GESTURES.index("tongue_high")] = high
    target_A[GESTURES.index("tongue_front")] = front
    target_A[GESTURES.index("lips_rounded")] = rounded
    target_A[GESTURES.index("tense")] = tense
    target_A[GESTURES.index("jaw_open")] = (1 - high) / 2
    return target_A


def _blur(path_TA: np.ndarray, sigma_bins: float) -> np.ndarray:
    """Gaussian smoothing over time; the ends go on as they are."""
    reach = max(1, int(np.ceil(3 * sigma_bins)))
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(sigma_bins, 1e-3)) ** 2)
    taps /= taps.sum()
    padded = np.pad(path_TA, ((reach, reach), (0, 0)), mode="edge")
    return sum(tap * padded[shift : shift + len(path_TA)] for shift, tap in enumerate(taps))
