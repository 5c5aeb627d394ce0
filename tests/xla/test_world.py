"""What a sum over ranks lets through, counts that are exact and losses whatever they are; and tensors held in parts."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from xla_b2t.xla import spawn
from xla_b2t.xla.machine import Machine
from xla_b2t.xla.world import Alone

sys.path.insert(0, str(Path(__file__).parent))
import rank_targets

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


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tensors_in_parts_come_together_again(tmp_path, num_ranks):
    spawn.run(rank_targets.write_parts, (str(tmp_path),), Machine("cpu", 1), num_ranks, tmp_path / "crash")
    times = num_ranks * (num_ranks + 1) / 2
    wholes = [(times * np.arange(14.0)).reshape(2, 7), np.array(3 * times), times * np.ones((6, 2))]
    expected = [whole.tolist() for whole in wholes]
    squares = float(sum((whole**2).sum() for whole in wholes))
    for rank in range(num_ranks):
        shapes, on_host, dtypes, joined = ast.literal_eval((tmp_path / f"{rank}.txt").read_text())
        # 7 in 3 parts are 9 with the zeros, 2 are 3: the axis of 7 has less to fill in.
        assert shapes == ([(2, 7), (1,), (6, 2)] if num_ranks == 1 else [(2, 3), (1,), (2, 2)])
        assert on_host == (expected if rank == 0 else [])
        assert dtypes == ["torch.bfloat16", *["torch.float32"] * 3]
        assert joined == [*expected, squares]
