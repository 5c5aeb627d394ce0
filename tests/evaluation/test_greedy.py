import numpy as np
import pytest

from xla_b2t.evaluation.greedy import collapse


@pytest.mark.parametrize(
    ("ids", "decoded"),
    [
        ([0, 0, 0], []),
        ([3, 3, 3], [3]),
        ([3, 0, 3], [3, 3]),
        ([0, 1, 1, 0, 2, 2, 1, 0], [1, 2, 1]),
        ([40], [40]),
    ],
)
def test_collapse_drops_repeats_then_blanks(ids, decoded):
    assert collapse(np.array([ids]), np.array([len(ids)])) == [decoded]


def test_collapse_ignores_what_stands_behind_the_steps():
    ids_BP = np.array([[1, 2, 3, 4], [1, 1, 9, 9], [5, 5, 5, 5]], dtype=np.int32)
    assert collapse(ids_BP, np.array([3, 2, 0], dtype=np.int32)) == [[1, 2, 3], [1], []]


def test_collapse_unequal_batches_are_a_fault():
    with pytest.raises(ValueError, match="shorter"):
        collapse(np.zeros((2, 3), dtype=int), np.array([3]))


def test_collapse_undoes_a_random_alignment():
    rng = np.random.default_rng(0)
    for _ in range(200):
        labels = rng.integers(1, 5, size=rng.integers(0, 8)).tolist()
        path, previous = [], 0
        for label in labels:
            # Equal neighbours need a blank between them, others may have one.
            path += [0] * int(rng.integers(1 if label == previous else 0, 3)) + [label] * int(rng.integers(1, 4))
            previous = label
        path += [0] * int(rng.integers(0, 3))
        assert collapse(np.array([path + [7]]), np.array([len(path)])) == [labels]
