"""The search: the largest batch on lines, steps and refusals, and how seldom it asks."""

import pytest

from xla_b2t.memory.batch_size import largest


class Need:
    """A line, that is refused without a figure from some batch on; it remembers what it was asked."""

    def __init__(self, fixed, per_trial, refused_from=10**9):
        self.fixed, self.per_trial, self.refused_from = fixed, per_trial, refused_from
        self.asked = []

    def __call__(self, batch):
        self.asked.append(batch)
        return None if batch >= self.refused_from else self.fixed + self.per_trial * batch


def test_search_on_a_line_finds_the_largest_with_four_questions():
    need = Need(1000, 10)
    found = largest(need, 4000, step=8, guess=64, per_trial_bytes=11, most=4096)
    assert found.batch_size == 296  # 300 trials would meet the limit
    assert need.asked == [64, 272, 296, 304]
    assert found.is_bounded


def test_search_that_guesses_right_asks_for_the_two_beside_the_limit_alone():
    need = Need(1000, 10)
    found = largest(need, 4000, step=8, guess=299, per_trial_bytes=10, most=4096)
    assert need.asked == [296, 304]
    assert (found.batch_size, found.is_bounded) == (296, True)


@pytest.mark.parametrize("true", [0, 8, 16, 64, 176, 504, 512])
@pytest.mark.parametrize("guess", [1, 8, 100, 512, 10_000])
def test_search_from_any_guess_finds_the_same(true, guess):
    for need in (Need(0, 10), Need(-300, 11, refused_from=true + 8), Need(0, 0, refused_from=true + 8)):
        limit = 10 * true + 9 if need.fixed == 0 and need.per_trial else 10**6
        found = largest(need, limit, step=8, guess=guess, per_trial_bytes=11, most=512)
        assert found.batch_size == true
        assert found.is_bounded == (true < 512)
        assert len(set(need.asked)) == len(need.asked)


def test_search_where_nothing_fits_says_zero():
    need = Need(10**6, 1)
    found = largest(need, 4000, step=8, guess=64, per_trial_bytes=11, most=512)
    assert (found.batch_size, found.is_bounded) == (0, True)
    assert need.asked[-1] == 8


def test_search_on_a_curve_asks_few_times():
    asked = []

    def need(batch):
        asked.append(batch)
        return 1000 + 10 * batch + batch**2 // 50 if batch < 900 else None

    found = largest(need, 15_000, step=8, guess=128, per_trial_bytes=13, most=4096)
    fits = [batch for batch in range(8, 896, 8) if 1000 + 10 * batch + batch**2 // 50 <= 15_000]
    assert found.batch_size == fits[-1]
    assert len(asked) <= 7
