from dataclasses import replace

import numpy as np
import pytest

from xla_b2t.data.articulation import SPACE
from xla_b2t.data.tuning import record, session_tunings


def likeness(a, b):
    return float(np.corrcoef(a.crossings_AN.ravel(), b.crossings_AN.ravel())[0, 1])


def test_session_tunings_drift_apart_slowly_and_keep_their_strength():
    tunings = session_tunings(seed=0, gaps_days=[0, 7, 7, 7, 7, 7, 7, 7], num_features=512, signal=0.5, drift=0.3)
    alike = [likeness(tunings[0], tuning) for tuning in tunings[1:]]
    assert alike[0] == pytest.approx(np.sqrt(1 - 0.3**2), abs=0.03)
    assert alike == sorted(alike, reverse=True)
    sizes = [tuning.crossings_AN.std() for tuning in tunings]
    assert max(sizes) / min(sizes) < 1.1
    assert not np.allclose(tunings[0].gain_N, tunings[1].gain_N)
    assert not np.allclose(tunings[0].rate_N, tunings[1].rate_N)


def test_session_tunings_longer_gap_drifts_more():
    near, far = (session_tunings(0, [0, gap], 512, 0.5, 0.3) for gap in (2, 28))
    assert likeness(*near) > likeness(*far) + 0.05


def test_session_tunings_without_drift_stay_and_with_all_of_it_are_new():
    still = session_tunings(0, [0, 7], 512, 0.5, 0.0)
    assert likeness(*still) == pytest.approx(1)
    new = session_tunings(0, [0, 7], 512, 0.5, 1.0)
    assert abs(likeness(*new)) < 0.1


def test_session_tunings_first_array_is_tuned_most():
    (tuning,) = session_tunings(0, [0], 512, 0.5, 0.3)
    per_array = tuning.crossings_AN.reshape(SPACE, 4, 64).std(axis=(0, 2))
    assert per_array.argmax() == 0
    assert per_array.argmin() == 2


def test_record_crossings_are_counts_and_power_shares_their_tuning():
    (tuning,) = session_tunings(0, [0], 64, 0.5, 0.3)
    path_TA = np.random.default_rng(0).standard_normal((3000, SPACE)).astype(np.float32)
    features_TC = record(path_TA, tuning, np.random.default_rng(1))
    assert features_TC.shape == (3000, 64)
    assert features_TC.dtype == np.float32
    crossings, power = features_TC[:, :32], features_TC[:, 32:]
    assert (crossings >= 0).all()
    assert (crossings == np.rint(crossings)).all()
    assert (power < 0).any()
    correlations = [np.corrcoef(crossings[:, n], power[:, n])[0, 1] for n in range(32)]
    assert np.mean(correlations) > 0.2


def test_record_rest_rate_is_the_electrodes_own():
    (tuning,) = session_tunings(0, [0], 64, 0.5, 0.3)
    silent = replace(tuning, shared_FN=np.zeros_like(tuning.shared_FN))
    trials = [record(np.zeros((400, SPACE), np.float32), silent, np.random.default_rng(seed)) for seed in range(40)]
    rates = np.concatenate(trials)[:, :32].mean(axis=0)
    np.testing.assert_allclose(rates, silent.rate_N, rtol=0.15)
