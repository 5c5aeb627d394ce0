"""Whole groups or an equal part of one on every rank, or an error with the numbers; and smaller ones of the same."""

import numpy as np
import pytest

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import batch_at_most, cut_batch, plan_batches, smaller_batch
from xla_b2t.data.groups import Batch
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
    assert "multiple of 8 or a number that divides it" in caught.value.fix


def test_plan_batches_of_two_sizes_that_disagree_names_both():
    with pytest.raises(UserError) as caught:
        plan(8, batch_size=16, global_batch=64)
    assert "is 128, train.global_batch is 64" in caught.value.what
    assert "train.global_batch" in caught.value.where
    assert "set the other to 0" in caught.value.fix


def in_numbers(found):
    return found.batch_size, found.accumulation


@pytest.mark.parametrize(
    ("num_ranks", "keys", "expected"),
    [
        (8, {"global_batch": 512}, [(64, 1), (32, 2), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]),
        (8, {"global_batch": 512, "accumulation": 2}, [(32, 2), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]),
        (1, {"batch_size": 24, "global_batch": 0}, [(24, 1), (16, 2), (8, 3), (4, 6), (2, 12), (1, 24)]),
        (8, {"global_batch": 72}, [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]),
        # Slots that nobody fills are not carried on: 8 groups of 8 ranks are one slot each, and not two.
        (8, {"global_batch": 64, "accumulation": 2}, [(8, 2), (4, 2), (2, 4), (1, 8)]),
    ],
)
def test_smaller_plan_keeps_the_update_down_to_single_trials(num_ranks, keys, expected):
    plans = [plan(num_ranks, **keys)]
    while smaller := plans[-1].smaller():
        plans.append(smaller)
    assert list(map(in_numbers, plans)) == expected
    for each in plans:
        assert (each.global_batch, each.groups_per_update) == (plans[0].global_batch, plans[0].groups_per_update)
        assert each.batch_size * each.accumulation * num_ranks >= each.global_batch
        assert each.groups_per_validation_slot == plans[0].groups_per_validation_slot


@pytest.mark.parametrize(("num_ranks", "global_batch"), [(8, 512), (2, 64), (1, 24), (3, 24), (8, 72)])
def test_smaller_plan_is_the_plan_of_a_run_that_its_keys_configure(num_ranks, global_batch):
    smaller = plan(num_ranks, global_batch=global_batch).smaller()
    configured = []
    while smaller:
        keys = [word for word in smaller.as_keys().split() if word != "--set"]
        if keys:
            config = configuration.load(None, keys)
            found = plan_batches(config, group_size=8, num_ranks=num_ranks)
            assert (found.pieces, in_numbers(found)) == (smaller.pieces, in_numbers(smaller))
            for name in ("slots_per_update", "groups_per_slot", "groups_per_update"):
                assert getattr(found, name) == getattr(smaller, name), name
        configured.append(bool(keys))
        smaller = smaller.smaller()
    # 9 groups on 8 ranks leave slots empty, and no key says so of a part of a group.
    assert all(configured) or (global_batch == 72 and configured == [True, False, False, False])


def test_plan_at_most_a_size_stops_at_the_first_that_fits():
    whole = plan(8, global_batch=512)
    assert [in_numbers(whole.at_most(size)) for size in (100, 64, 63, 8, 5, 1)] == [
        (64, 1), (64, 1), (32, 2), (8, 8), (4, 16), (1, 64),
    ]  # fmt: skip


def test_plan_batches_of_part_of_a_group_cuts_a_slot():
    found = plan(8, batch_size=2, global_batch=0, accumulation=8)
    assert (found.slots_per_update, found.groups_per_slot, found.pieces) == (2, 1, 4)
    assert (in_numbers(found), found.global_batch, found.idle_share) == ((2, 8), 128, 0)
    assert found.in_words() == "8 ranks x 2 trials x 8 micro-steps: 128 trials an update"
    assert plan(8, batch_size=1, global_batch=0, accumulation=8).micro_steps_in_words() == "1 trial x 8 micro-steps"


def test_plan_batches_of_part_of_a_group_without_its_micro_steps_says_how_many():
    with pytest.raises(UserError) as caught:
        plan(8, batch_size=2, global_batch=0, accumulation=3)
    assert "cuts a group of 8 trials into 4 micro-steps; train.accumulation is 3" in caught.value.what
    assert caught.value.where == "train.accumulation"
    assert caught.value.fix == "use a multiple of 4"


@pytest.mark.parametrize(("trials", "expected"), [(64, 32), (24, 12), (9, 3), (7, 1), (2, 1), (1, None)])
def test_smaller_batch_cuts_evenly_by_the_smallest_factor(trials, expected):
    assert smaller_batch(trials) == expected


def test_batch_at_most_goes_down_until_it_fits():
    assert [batch_at_most(24, most) for most in (30, 24, 12, 5, 1)] == [24, 24, 12, 3, 1]


def test_cut_batch_gives_every_trial_once_in_order_and_without_a_copy():
    rows = np.arange(6, dtype=np.int32)
    features_BTC = np.arange(6 * 4 * 2, dtype=np.uint16).reshape(6, 4, 2)
    whole = Batch(features_BTC, rows, np.zeros((6, 3), np.int32), rows, rows, rows, rows > 2, tuple("abcdef"))
    parts = list(cut_batch(whole, 2))
    assert [part.trial_ids for part in parts] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert np.concatenate([part.valid_B for part in parts]).tolist() == whole.valid_B.tolist()
    assert all(np.shares_memory(part.features_BTC, features_BTC) for part in parts)
    np.testing.assert_array_equal(parts[2].features_BTC, features_BTC[4:])
    assert list(cut_batch(whole, 6)) == [whole]
