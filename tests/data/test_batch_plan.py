"""Whole groups on every rank, or an error with the numbers."""

import pytest

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.errors import UserError


def plan(num_ranks, **train):
    keys = [f"train.{key}={value}" for key, value in train.items()]
    return plan_batches(configuration.load(None, keys), group_size=8, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "groups_per_slot", "idle"),
    [(1, 8, 0.0), (2, 4, 0.0), (3, 3, 1 / 9), (4, 2, 0.0), (8, 1, 0.0), (16, 1, 0.5)],
)
def test_plan_batches_of_global_64_holds_on_any_number_of_ranks(num_ranks, groups_per_slot, idle):
    found = plan(num_ranks, global_batch=64)
    assert (found.global_batch, found.groups_per_update, found.groups_per_slot) == (64, 8, groups_per_slot)
    assert found.idle_share == pytest.approx(idle)


def test_plan_batches_from_batch_size_multiplies_ranks_and_accumulation():
    found = plan(8, batch_size=16, global_batch=0, accumulation=3)
    assert (found.global_batch, found.batch_size, found.groups_per_slot) == (384, 16, 2)


def test_plan_batches_of_partial_group_names_sizes():
    with pytest.raises(UserError) as caught:
        plan(8, batch_size=12, global_batch=0)
    assert "train.batch_size is 12" in caught.value.what and "groups of 8" in caught.value.what
    assert caught.value.where == "train.batch_size"
    assert "multiple of 8" in caught.value.fix


def test_plan_batches_of_two_sizes_that_disagree_names_both():
    with pytest.raises(UserError) as caught:
        plan(8, batch_size=16, global_batch=64)
    assert "is 128, train.global_batch is 64" in caught.value.what
    assert "train.global_batch" in caught.value.where
    assert "set the other to 0" in caught.value.fix
