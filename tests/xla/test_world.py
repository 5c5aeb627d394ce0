"""What a sum over ranks lets through: counts that are exact, and losses whatever they are."""

import numpy as np
import pytest

from xla_b2t.xla.world import Alone

IMPOSSIBLE = 1e30  # the loss of a trial whose labels do not fit its length


def test_sum_of_counts_up_to_the_largest_exact_gives_them_back():
    counts = np.array([0.0, 3.0, 2.0**24, -(2.0**24)])
    np.testing.assert_array_equal(Alone("cpu").sum(counts), counts)


@pytest.mark.parametrize("value", [2.0**24 + 1, -(2.0**24) - 2, np.inf, np.nan])
def test_sum_of_a_count_that_is_not_exact_is_refused(value):
    with pytest.raises(OverflowError, match=f"a count over ranks is {value:.10g}, float32 counts exactly to"):
        Alone("cpu").sum(np.array([1.0, value]))


@pytest.mark.parametrize("loss", [1426 * 12_000.0, IMPOSSIBLE, 1426 * IMPOSSIBLE, np.inf, np.nan])
def test_sum_that_need_not_be_exact_lets_every_loss_through(loss):
    np.testing.assert_allclose(Alone("cpu").sum(np.array([1.0, loss]), exact=False), [1.0, loss], rtol=1e-7)
