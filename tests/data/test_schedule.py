import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from xla_b2t.data.groups import SplitIndex
from xla_b2t.data.schedule import EMPTY, Schedule, deal, plan_evaluation
from xla_b2t.errors import UserError


def index_of(buckets, days=None, num_valid=None):
    groups = len(buckets)
    zeros = np.zeros((groups, 8), np.int32)
    return SplitIndex(
        split="train",
        labelled=True,
        max_label=40,
        files=("groups/train-0000.h5",),
        bucket_G=np.array(buckets, np.int32),
        file_G=np.zeros(groups, np.int32),
        place_G=np.arange(groups, dtype=np.int32),
        pass_G=np.zeros(groups, np.int32),
        checksum_G=np.zeros(groups, np.uint32),
        valid_GB=np.arange(8) < np.array(num_valid if num_valid is not None else [8] * groups, int).reshape(groups, 1),
        days_GB=zeros
        + np.array(days if days is not None else [[0]] * groups, np.int32).reshape(groups, -1 if groups else 1),
        blocks_GB=zeros - 1,
        input_bins_GB=zeros,
        label_lengths_GB=zeros,
        required_steps_GB=zeros,
        id_bytes_G=np.ones(groups, np.int32),
        offsets_GN=np.zeros((groups, 8), np.int64),
    )


MIXED = index_of([0] * 17 + [1] * 8 + [2] * 7 + [3] * 1, days=[group % 5 for group in range(33)])


@pytest.mark.parametrize("groups_per_update", [1, 2, 8, 40])
def test_epochs_take_every_group_exactly_once_in_updates_of_one_bucket(groups_per_update):
    schedule = Schedule("epochs", MIXED, 0, groups_per_update)
    for epoch in range(3):
        taken = []
        for position in range(schedule.updates_per_epoch):
            update = schedule.update(epoch * schedule.updates_per_epoch + position)
            assert update.epoch == epoch
            assert 1 <= len(update.groups) <= groups_per_update
            assert {MIXED.bucket_G[group] for group in update.groups} == {update.bucket}
            taken += update.groups
        assert sorted(taken) == list(range(33))


def test_epochs_number_of_updates_is_the_least_for_groups_that_do_not_mix():
    assert Schedule("epochs", MIXED, 0, 8).updates_per_epoch == 3 + 1 + 1 + 1


def test_epochs_differ_in_order_and_in_who_is_together():
    schedule = Schedule("epochs", MIXED, 0, 4)
    epochs = [
        [schedule.update(epoch * schedule.updates_per_epoch + i) for i in range(schedule.updates_per_epoch)]
        for epoch in (0, 1)
    ]
    assert [update.bucket for update in epochs[0]] != [update.bucket for update in epochs[1]]
    assert {frozenset(update.groups) for update in epochs[0]} != {frozenset(update.groups) for update in epochs[1]}


def in_passes(passes, trials=61, size=8, seed=0):
    """An index whose trials are grouped anew in each pass, some groups of several days and some not full.

    Returns:
        The index, and trial_GB: the number of the trial in each slot, -1 in an empty one.
    """
    generator = np.random.default_rng(seed)
    bucket_T, day_T = generator.integers(0, 3, trials), generator.integers(0, 4, trials)
    groups, buckets, numbers = [], [], []
    for number in range(passes):
        for bucket in range(3):
            of_bucket = generator.permutation(np.flatnonzero(bucket_T == bucket)).tolist()
            while of_bucket:
                taken = [of_bucket.pop() for _ in range(min(len(of_bucket), int(generator.integers(1, size + 1))))]
                groups.append(taken + [-1] * (size - len(taken)))
                buckets.append(bucket)
                numbers.append(number)
    trial_GB = np.array(groups)
    valid_GB = trial_GB >= 0
    days_GB = np.where(valid_GB, day_T[trial_GB], 0)
    tables = {"days_GB": days_GB, "valid_GB": valid_GB, "pass_G": np.array(numbers, np.int32)}
    return replace(index_of(buckets), **tables), trial_GB


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("passes", [1, 3])
def test_epochs_take_every_trial_exactly_once_over_ranks_mixed_groups_and_passes(num_ranks, accumulation, passes):
    index, trial_GB = in_passes(passes)
    assert any(len(set(index.days_GB[group][index.valid_GB[group]])) > 1 for group in range(len(trial_GB)))
    schedule = Schedule("epochs", index, 3, 8)
    step = 0
    for epoch in range(2 * passes + 1):
        taken = []
        while (update := schedule.update(step)).epoch == epoch:
            assert {int(index.pass_G[group]) for group in update.groups} == {epoch % passes}
            for rank in deal(update.groups, 8, num_ranks, accumulation):
                assert len(rank) == accumulation
                for group in (group for micro in rank for group in micro if group != EMPTY):
                    taken += [trial for trial in trial_GB[group] if trial >= 0]
            step += 1
        assert update.epoch == epoch + 1 and schedule.epochs(step) == epoch + 1
        assert sorted(taken) == list(range(61))


def test_epochs_put_groups_of_a_bucket_together_anew_each_epoch():
    index, _ = in_passes(1, trials=200)
    schedule = Schedule("epochs", index, 0, 4)
    together = []
    for epoch in range(4):
        steps = range(epoch * schedule.updates_per_epoch, (epoch + 1) * schedule.updates_per_epoch)
        together.append({frozenset(schedule.update(step).groups) for step in steps})
    full = [{groups for groups in epoch if len(groups) == 4} for epoch in together]
    for epoch in range(3):
        assert len(full[epoch] & full[epoch + 1]) < 0.1 * len(full[epoch])


@pytest.mark.parametrize("recipe", ["epochs", "days"])
@pytest.mark.parametrize("passes", [1, 3])
def test_schedule_resumed_at_any_step_is_the_uninterrupted_one(recipe, passes):
    index, _ = in_passes(passes)
    uninterrupted = Schedule(recipe, index, 5, 8)
    updates = [uninterrupted.update(step) for step in range(40)]
    for begin in range(40):
        resumed = Schedule(recipe, in_passes(passes)[0], 5, 8)
        assert [resumed.update(step) for step in range(begin, 40)] == updates[begin:]


def test_epochs_done_grow_by_the_share_of_an_epoch():
    index, _ = in_passes(2)
    schedule = Schedule("epochs", index, 0, 8)
    first = schedule.updates_per_epoch
    assert schedule.epochs(0) == 0 and schedule.epochs(1) == pytest.approx(1 / first)
    done = [schedule.epochs(step) for step in range(5 * first)]
    assert all(before < after for before, after in itertools.pairwise(done))


def test_days_draw_from_all_passes_as_many_groups_an_epoch_as_one_has():
    index, _ = in_passes(2, trials=200)
    schedule = Schedule("days", index, 0, 8)
    assert schedule.updates_per_epoch == -(-len(index.bucket_G) // 16)
    drawn = {int(index.pass_G[group]) for step in range(40) for group in schedule.update(step).groups}
    assert drawn == {0, 1}


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_plan_evaluation_of_several_passes_takes_every_trial_once(num_ranks):
    index, trial_GB = in_passes(3)
    steps = plan_evaluation(index, num_ranks, 2)
    groups = [group for step in steps for rank in step.groups_by_rank for group in rank if group != EMPTY]
    taken = [trial for group in groups for trial in trial_GB[group] if trial >= 0]
    assert sorted(taken) == list(range(61))


@pytest.mark.parametrize("recipe", ["epochs", "days"])
def test_update_asked_for_in_any_order_is_the_same(recipe):
    forward = [Schedule(recipe, MIXED, 7, 8).update(step) for step in range(40)]
    resumed = Schedule(recipe, MIXED, 7, 8)
    assert [resumed.update(step) for step in reversed(range(40))] == forward[::-1]
    assert [Schedule(recipe, MIXED, 8, 8).update(step).groups for step in range(40)] != [u.groups for u in forward]


def test_days_updates_are_full_and_of_distinct_days_in_one_bucket():
    schedule = Schedule("days", MIXED, 0, 8, days_per_batch=4)
    for step in range(200):
        update = schedule.update(step)
        assert len(update.groups) == 8
        assert {MIXED.bucket_G[group] for group in update.groups} == {update.bucket}
        days_there = len(set(MIXED.days_GB[MIXED.bucket_G == update.bucket, 0]))
        counts = Counter(MIXED.days_GB[list(update.groups), 0])
        assert len(counts) == min(4, days_there)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert schedule.updates_per_epoch == 5
    assert schedule.update(5).epoch == 1


def test_days_draw_buckets_and_days_as_the_published_recipe_does():
    # Day 0: 2 groups in bucket 0, 6 in bucket 1. Day 1: 4 and 0. Day 2: 1 of 2 trials and 1 of 8.
    index = index_of(
        [0] * 2 + [1] * 6 + [0] * 4 + [0, 1], days=[0] * 8 + [1] * 4 + [2] * 2, num_valid=[8] * 12 + [2, 8]
    )
    shares_in_0 = np.array([0.25, 1.0, 0.2])
    schedule = Schedule("days", index, 0, 1, days_per_batch=1)
    updates = [schedule.update(step) for step in range(6000)]
    in_0 = [update for update in updates if update.bucket == 0]
    assert len(in_0) / len(updates) == pytest.approx(shares_in_0.mean(), abs=0.02)
    days = Counter(int(index.days_GB[update.groups[0], 0]) for update in in_0)
    for day in range(3):
        assert days[day] / len(in_0) == pytest.approx(shares_in_0[day] / shares_in_0.sum(), abs=0.03)


def test_days_draw_a_group_as_often_as_it_has_trials_of_the_day():
    # One bucket and two days: a group of day 0 alone, one of day 1 alone, one with 2 trials of day 0 and 6 of day 1.
    index = index_of([0, 0, 0], days=[[0] * 8, [1] * 8, [0] * 2 + [1] * 6])
    schedule = Schedule("days", index, 0, 1, days_per_batch=1)
    taken = Counter(schedule.update(step).groups[0] for step in range(6000))
    expected = [0.5 * 8 / 10, 0.5 * 8 / 14, 0.5 * 2 / 10 + 0.5 * 6 / 14]
    for group in range(3):
        assert taken[group] / 6000 == pytest.approx(expected[group], abs=0.03)


def test_days_are_limited_by_the_groups_of_an_update():
    update = Schedule("days", MIXED, 0, 2, days_per_batch=4).update(0)
    assert len(update.groups) == 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("groups_per_update", [1, 7, 8, 17])
def test_deal_every_group_once_evenly_in_one_shape(num_ranks, accumulation, groups_per_update):
    for count in (0, 1, 5, 7, 8, 17):
        if count > groups_per_update:
            continue
        dealt = deal(range(100, 100 + count), groups_per_update, num_ranks, accumulation)
        assert len(dealt) == num_ranks
        slots = -(-groups_per_update // (num_ranks * accumulation))
        assert {len(rank) for rank in dealt} == {accumulation}
        assert {len(micro) for rank in dealt for micro in rank} == {slots}
        real = [group for rank in dealt for micro in rank for group in micro if group != EMPTY]
        assert sorted(real) == list(range(100, 100 + count))
        loads = [sum(group != EMPTY for micro in rank for group in micro) for rank in dealt]
        assert max(loads) - min(loads) <= 1
        for rank in dealt:
            micro_loads = [sum(group != EMPTY for group in micro) for micro in rank]
            assert max(micro_loads) - min(micro_loads) <= 1


def test_deal_same_update_on_any_number_of_ranks_is_the_same_set():
    update = Schedule("epochs", MIXED, 0, 8).update(2)
    for num_ranks in (1, 2, 4, 8):
        dealt = deal(update.groups, 8, num_ranks, 1)
        assert sorted(g for rank in dealt for micro in rank for g in micro if g != EMPTY) == sorted(update.groups)


@pytest.mark.parametrize("num_groups", [17, 8, 7, 1, 0])
@pytest.mark.parametrize("groups_per_core", [1, 2])
def test_plan_evaluation_eight_ranks_take_equal_steps_and_each_group_once(num_groups, groups_per_core):
    index = index_of([group % 3 for group in range(num_groups)])
    steps = plan_evaluation(index, 8, groups_per_core)
    taken = []
    for step in steps:
        assert len(step.groups_by_rank) == 8
        assert {len(groups) for groups in step.groups_by_rank} == {groups_per_core}
        real = [group for groups in step.groups_by_rank for group in groups if group != EMPTY]
        assert real
        assert {index.bucket_G[group] for group in real} == {step.bucket}
        taken += real
    assert sorted(taken) == list(range(num_groups))


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"recipe": "random"}, "unknown recipe 'random'", "data.recipe"),
        ({"seed": -1}, "run.seed is -1, expected at least 0", "run.seed"),
        ({"groups_per_update": 0}, "groups per update is 0, expected at least 1", "groups per update"),
        ({"days_per_batch": 0}, "data.days_per_batch is 0, expected at least 1", "data.days_per_batch"),
        ({"index": index_of([])}, "there is no group to train on", "groups/index.h5:/train"),
    ],
)
def test_schedule_impossible_arguments_are_user_errors(changes, what, where):
    arguments = {"recipe": "epochs", "index": MIXED, "seed": 0, "groups_per_update": 8, "days_per_batch": 4, **changes}
    with pytest.raises(UserError) as raised:
        Schedule(**arguments)
    assert (raised.value.what, raised.value.where) == (what, where)
    assert raised.value.fix.startswith(("give", "run xla_b2t prebatch"))
