import numpy as np
import pytest

from xla_b2t.data.articulation import GESTURES, SPACE, targets, trajectory
from xla_b2t.data.phonemes import BLANK, PHONEMES, SILENCE


def generator(seed=0):
    return np.random.default_rng(seed)


def test_targets_every_phoneme_has_a_place_of_its_own_and_silence_is_rest():
    targets_KEA = targets()
    assert targets_KEA.shape == (41, 2, SPACE)
    assert not targets_KEA[[BLANK, SILENCE]].any()
    spoken = targets_KEA[1:SILENCE].reshape(39, -1)
    apart = np.linalg.norm(spoken[:, None] - spoken[None], axis=-1) + 10 * np.eye(39)
    assert apart.min() > 0.5
    assert (spoken[:, GESTURES.index("speaking")] == 1).all()


@pytest.mark.parametrize(
    ("voiceless", "voiced"), [("P", "B"), ("T", "D"), ("K", "G"), ("F", "V"), ("S", "Z"), ("SH", "ZH")]
)
def test_targets_pairs_differ_in_voice_alone(voiceless, voiced):
    gestures = targets()[:, 0, : len(GESTURES)]
    differs = gestures[PHONEMES.index(voiceless)] != gestures[PHONEMES.index(voiced)]
    assert [GESTURES[axis] for axis in np.flatnonzero(differs)] == ["voiced"]


def test_targets_glides_and_affricates_move():
    targets_KEA = targets()
    moving = {PHONEMES[k] for k in range(41) if (targets_KEA[k, 0] != targets_KEA[k, 1]).any()}
    assert moving == {"EY", "AY", "OY", "AW", "OW", "CH", "JH"}


def test_trajectory_starts_and_ends_at_rest_and_reaches_its_targets():
    label = PHONEMES.index("M")
    path_TA = trajectory((label,), bins_per_phoneme=40, silence_bins=60, generator=generator())
    assert path_TA.dtype == np.float32
    assert np.abs(path_TA[[0, -1]]).max() < 0.01
    assert np.abs(path_TA - targets()[label, 0]).max(axis=1).min() < 0.05


def test_trajectory_length_follows_the_rate():
    labels = tuple(range(1, 41)) * 3
    means = []
    for bins in (4, 8, 28):
        lengths = [len(trajectory(labels, bins, 0, generator(seed))) / len(labels) for seed in range(40)]
        assert 0.05 < np.std(lengths) / np.mean(lengths) < 0.3
        means.append(np.mean(lengths))
    assert means == pytest.approx([4, 8, 28], rel=0.1)


def test_trajectory_vowels_last_longer_than_stops():
    def length(name):
        return np.mean([len(trajectory((PHONEMES.index(name),) * 20, 10, 0, generator(seed))) for seed in range(20)])

    assert length("AY") > 1.3 * length("B")


def test_trajectory_neighbours_blur_into_each_other():
    path_TA = trajectory(tuple(PHONEMES.index(name) for name in ("S", "M", "S", "M")), 12, 12, generator())
    steps = np.abs(np.diff(path_TA[:, GESTURES.index("nasal")]))
    assert 0 < steps.max() < 0.3


def test_trajectory_generator_decides():
    labels = (1, 2, 3, 40)
    np.testing.assert_array_equal(trajectory(labels, 8, 10, generator(1)), trajectory(labels, 8, 10, generator(1)))
    assert len({len(trajectory(labels, 8, 10, generator(seed))) for seed in range(10)}) > 3
