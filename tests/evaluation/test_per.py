import numpy as np
import pytest

from xla_b2t.evaluation.per import DayScore, score, total


def distance(reference, decoded):
    """Edit distance by its definition."""
    row = list(range(len(decoded) + 1))
    for i, wanted in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, found in enumerate(decoded, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (wanted != found))
    return row[-1]


@pytest.mark.parametrize(
    ("reference", "decoded", "errors"),
    [([1, 2, 3], [1, 2, 3], 0), ([1, 2, 3], [], 3), ([], [1], 1), ([1, 2, 3], [1, 3], 1), ([1, 2, 3], [1, 4, 3, 3], 2)],
)
def test_score_counts_edits(reference, decoded, errors):
    assert score([("day", reference, decoded)]) == {"day": DayScore(errors, len(reference))}


def test_score_agrees_with_the_definition_on_random_sequences():
    rng = np.random.default_rng(0)
    for _ in range(100):
        reference, decoded = (rng.integers(1, 41, size=rng.integers(0, 30)).tolist() for _ in range(2))
        assert score([("day", reference, decoded)])["day"].errors == distance(reference, decoded)


def test_score_is_the_sum_over_trials_not_the_mean_of_rates():
    pairs = [("b", [1] * 90, [1] * 90), ("a", [1] * 10, []), ("b", [2], [3])]
    by_day = score(pairs)
    assert list(by_day.items()) == [("a", DayScore(10, 10)), ("b", DayScore(1, 91))]
    assert total(by_day) == DayScore(11, 101)
    assert total(by_day).per == 11 / 101


def test_per_of_nothing_is_defined():
    assert total({}).per == 0.0
    assert DayScore(2, 0).per == 2.0
    assert DayScore(3, 2).per == 1.5
