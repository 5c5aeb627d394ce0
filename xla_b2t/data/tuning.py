"""A simulated participant's electrodes: how they answer to articulation, how that drifts, and the noise they add.

In: a trajectory from `articulation`. Out: threshold crossings and spike-band power a bin, as recorded, not z-scored.
Four arrays, as many electrodes in each; a feature is `kind * electrodes + electrode`, threshold crossings first, as in
the public data.
"""

from dataclasses import dataclass

import numpy as np

from xla_b2t.data.articulation import SPACE

NUM_ARRAYS = 4
ARRAY_STRENGTHS = (1.0, 0.8, 0.5, 0.7)
"""How strongly the arrays are tuned, in the public order: ventral 6v, area 4, 55b, dorsal 6v."""

_STREAM = 5
_TUNED_SHARE = 0.35
_MEAN_RATE = 0.4
"""Threshold crossings a bin at rest: 20 a second."""
_RATE_SPREAD = 0.6
_GAIN_SPREAD = 0.2
_POWER_OWN_SHARE = 0.5
"""Part of spike-band power's tuning that the electrode's threshold crossings do not have."""
_NUM_SHARED = 6
_SHARED_SIZE = 0.35
_SHARED_MEMORY = 0.95
_TRIAL_GAIN_SPREAD = 0.1
_TRIAL_OFFSET_SPREAD = 0.1
_LARGEST_DRIVE = 2.5


@dataclass(frozen=True, eq=False)
class Tuning:
    """The electrodes of one session. Axes: A articulation, N electrodes, F shared fluctuations.

    Attributes:
        crossings_AN: float32, drive of the log rate of threshold crossings.
        power_AN: float32, drive of spike-band power.
        rate_N: float32, threshold crossings a bin at rest.
        gain_N: float32, what an electrode's drive is multiplied by.
        shared_FN: float32, weights of the fluctuations that electrodes have in common.
    """

    crossings_AN: np.ndarray
    power_AN: np.ndarray
    rate_N: np.ndarray
    gain_N: np.ndarray
    shared_FN: np.ndarray


def session_tunings(seed: int, gaps_days: list[int], num_features: int, signal: float, drift: float) -> list[Tuning]:
    """The electrodes of every session: each a step of a random walk away from the one before.

    A step keeps sqrt(1 - d^2) of the tuning and mixes in d of a fresh one (so the strength stays), with
    d = drift * sqrt(gap / 7 days), at most 1. Gains, rates at rest and shared fluctuations move with it.

    Args:
        seed: at least 0.
        gaps_days: days since the session before, one entry a session; the first does not count.
        num_features: a multiple of 8.
        signal: standard deviation of the drive that an array of strength 1 gets from an articulation of size 1.
        drift: 0 none, 1 a new participant every week.
    """
    walk: dict[str, np.ndarray] = {}
    tunings = []
    for session, gap in enumerate(gaps_days):
        fresh = _fresh(seed, session, num_features // 2)
        step = min(1.0, drift * np.sqrt(gap / 7)) if session else 1.0
        walk = {name: np.sqrt(1 - step**2) * walk.get(name, 0) + step * value for name, value in fresh.items()}
        tunings.append(_as_tuning(walk, num_features // 2, signal))
    return tunings


def record(path_TA: np.ndarray, tuning: Tuning, generator: np.random.Generator) -> np.ndarray:
    """What the electrodes record while a sentence is spoken: Poisson counts, and power with noise of its own.

    Args:
        path_TA: float32 (T, SPACE).
        tuning: of the session.
        generator: for the noise.

    Returns:
        float32 (T, features): threshold crossings of all electrodes, then their spike-band power.
    """
    num_bins, num_electrodes = len(path_TA), len(tuning.rate_N)
    trial_gain = np.exp(_TRIAL_GAIN_SPREAD * generator.standard_normal())
    offset_N = _TRIAL_OFFSET_SPREAD * generator.standard_normal(num_electrodes)
    common_TN = _fluctuations(num_bins, generator) @ tuning.shared_FN + offset_N
    gain_N = trial_gain * tuning.gain_N
    drive_TN = np.minimum(gain_N * (path_TA @ tuning.crossings_AN) + common_TN, _LARGEST_DRIVE)
    crossings_TN = generator.poisson(tuning.rate_N * np.exp(drive_TN))
    power_TN = gain_N * (path_TA @ tuning.power_AN) + common_TN
    power_TN += generator.standard_normal((num_bins, num_electrodes), dtype=np.float32)
    return np.concatenate([crossings_TN, power_TN], axis=1).astype(np.float32)


def _fresh(seed: int, session: int, num_electrodes: int) -> dict[str, np.ndarray]:
    """Standard normal draws of a session; those of an electrode's tuning are sparse, with the same variance."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _STREAM, session])))
    kept_AN = generator.random((SPACE, num_electrodes)) < _TUNED_SHARE
    return {
        "crossings": generator.standard_normal((SPACE, num_electrodes)) * kept_AN / np.sqrt(_TUNED_SHARE),
        "power": generator.standard_normal((SPACE, num_electrodes)) * kept_AN / np.sqrt(_TUNED_SHARE),
        "rate": generator.standard_normal(num_electrodes),
        "gain": generator.standard_normal(num_electrodes),
        "shared": generator.standard_normal((_NUM_SHARED, num_electrodes)),
    }


def _as_tuning(walk: dict[str, np.ndarray], num_electrodes: int, signal: float) -> Tuning:
    strength_N = np.repeat(ARRAY_STRENGTHS, num_electrodes // NUM_ARRAYS) * signal
    own = _POWER_OWN_SHARE
    values = {
        "crossings_AN": strength_N * walk["crossings"],
        "power_AN": strength_N * (np.sqrt(1 - own**2) * walk["crossings"] + own * walk["power"]),
        "rate_N": _MEAN_RATE * np.exp(_RATE_SPREAD * walk["rate"]),
        "gain_N": np.exp(_GAIN_SPREAD * walk["gain"]),
        "shared_FN": _SHARED_SIZE / np.sqrt(_NUM_SHARED) * walk["shared"],
    }
    return Tuning(**{name: value.astype(np.float32) for name, value in values.items()})


def _fluctuations(num_bins: int, generator: np.random.Generator) -> np.ndarray:
    """Slow common ups and downs of variance 1, float32 (T, F): each bin remembers the one before."""
    noise_TF = generator.standard_normal((num_bins, _NUM_SHARED), dtype=np.float32)
    noise_TF[1:] *= np.sqrt(1 - _SHARED_MEMORY**2)
    for place in range(1, num_bins):
        noise_TF[place] += _SHARED_MEMORY * noise_TF[place - 1]
    return noise_TF
