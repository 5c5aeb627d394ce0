"""The search: the largest batch on lines, steps and refusals, and how seldom it asks."""

import pytest

from xla_b2t.memory.batch_size import largest


def line(fixed, per_trial, refused_from=10**9):
    def need(batch):
        return None if batch >= refused_from else fixed + per_trial * batch

    return need


def test_search_on_a_line_finds_the_largest_with_four_questions():
    found = largest(line(1000, 10), 4000, step=8, guess=64, per_trial_bytes=11, most=4096)
    assert found.batch_size == 296  # 300 trials would meet the limit
    assert [batch for batch, _ in found.asked] == [64, 272, 296, 304]
    assert found.is_bounded


def test_search_uses_what_is_known_and_asks_for_the_two_beside_the_limit_alone():
    found = largest(line(1000, 10), 4000, step=8, guess=296, per_trial_bytes=11, most=4096, known={64: 1640})
    assert [batch for batch, _ in found.asked] == [296, 304]
    assert (found.batch_size, found.is_bounded) == (296, True)


@pytest.mark.parametrize("true", [0, 8, 16, 64, 176, 504, 512])
@pytest.mark.parametrize("guess", [1, 8, 100, 512, 10_000])
def test_search_from_any_guess_finds_the_same(true, guess):
    for need in (line(0, 10), line(-300, 11, refused_from=true + 8), line(0, 0, refused_from=true + 8)):
        limit = 10 * true + 9 if need(8) == 80 else 10**6
        found = largest(need, limit, step=8, guess=guess, per_trial_bytes=11, most=512)
        assert found.batch_size == true
        assert found.is_bounded == (true < 512)
        assert len({batch for batch, _ in found.asked}) == len(found.asked)


def test_search_where_nothing_fits_says_zero():
    found = largest(line(10**6, 1), 4000, step=8, guess=64, per_trial_bytes=11, most=512)
    assert (found.batch_size, found.is_bounded) == (0, True)
    assert found.asked[-1][0] == 8


def test_search_that_is_told_a_refusal_does_not_ask_above_it():
    found = largest(line(0, 10), 10**6, step=8, guess=400, per_trial_bytes=11, most=512, known={64: 640, 128: None})
    assert found.batch_size == 120
    assert all(batch < 128 for batch, _ in found.asked)


def test_search_on_a_curve_asks_few_times():
    asked = []

    def need(batch):
        asked.append(batch)
        return 1000 + 10 * batch + batch**2 // 50 if batch < 900 else None

    found = largest(need, 15_000, step=8, guess=128, per_trial_bytes=11, most=4096, known={64: 1721})
    fits = [batch for batch in range(8, 896, 8) if 1000 + 10 * batch + batch**2 // 50 <= 15_000]
    assert found.batch_size == fits[-1]
    assert len(asked) <= 6
