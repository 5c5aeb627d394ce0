import numpy as np

from xla_b2t.data.grouping import PlannedGroup, TrialRecord, cut_into_parts, plan_groups


def records(lengths, day=0, split="train", labels=3):
    return [
        TrialRecord(f"day{day}/{split}/trial_{i:04d}", day, day, -1, int(length), 8, (1,) * labels, labels)
        for i, length in enumerate(lengths)
    ]


def test_plan_groups_every_trial_lies_in_one_group_and_fits():
    generator = np.random.default_rng(0)
    trials = {
        "train": [r for day in range(3) for r in records(generator.integers(20, 300, 21), day)],
        "val": [r for day in range(3) for r in records(generator.integers(20, 400, 5), day, "val")],
    }
    plan = plan_groups(trials, group_size=4, num_buckets=3, seed=0)
    for split, groups in plan.groups.items():
        ids = [trial.trial_id for group in groups for trial in group.trials]
        assert sorted(ids) == sorted(record.trial_id for record in trials[split])
        for group in groups:
            assert 1 <= len(group.trials) <= 4
            assert max(trial.input_bins for trial in group.trials) <= plan.buckets[group.bucket].input_bins
    longest = max(record.input_bins for of_split in trials.values() for record in of_split)
    assert plan.buckets[-1].input_bins >= longest


def test_plan_groups_what_days_leave_over_fills_groups_of_neighbouring_days():
    trials = {"train": [r for day, count in enumerate((6, 5, 4, 3)) for r in records([30] * count, day)]}
    groups = plan_groups(trials, group_size=4, num_buckets=1, seed=0).groups["train"]
    days = [[trial.day for trial in group.trials] for group in groups]
    assert days == [[0] * 4, [1] * 4, [2] * 4, [0, 0, 1, 3], [3, 3]]


def test_plan_groups_edges_are_those_of_the_trials_own_lengths():
    plan = plan_groups({"train": records([100, 20, 110, 120, 130])}, group_size=4, num_buckets=2, seed=0)
    assert [bucket.input_bins for bucket in plan.buckets] == [32, 144]
    assert [len(group.trials) for group in plan.groups["train"]] == [4, 1]


def test_plan_groups_passes_have_each_trial_once_and_are_shuffled_otherwise():
    trials = {"train": records(range(20, 180)), "val": records([30] * 8, split="val")}
    plan = plan_groups(trials, 4, 2, 0, num_passes=3)
    of_pass = [[g for g in plan.groups["train"] if g.pass_number == number] for number in range(3)]
    ids = [[{t.trial_id for t in g.trials} for g in groups] for groups in of_pass]
    assert all(sorted(set().union(*each)) == sorted(r.trial_id for r in trials["train"]) for each in ids)
    assert ids[0] != ids[1] != ids[2]
    assert {group.pass_number for group in plan.groups["val"]} == {0}


def test_cut_into_parts_keeps_the_order_and_the_size():
    groups = [PlannedGroup(bucket, 0, ()) for bucket in (0, 1, 0, 2, 0, 0)]
    parts = cut_into_parts(groups, group_bytes=(10, 20, 50), most_bytes=30)
    assert [[group.bucket for group in part] for part in parts] == [[0, 1], [0], [2], [0, 0]]


def test_plan_groups_label_slots_hold_the_longest_label_of_any_split():
    trials = {"train": records([30] * 4, labels=3), "val": records([30] * 4, split="val", labels=11)}
    assert plan_groups(trials, 4, 1, 0).buckets[0].label_slots == 16


def test_plan_groups_unlabelled_trials_get_slots_all_the_same():
    assert plan_groups({"test": records([30] * 4, split="test", labels=0)}, 4, 1, 0).buckets[0].label_slots == 8


def test_plan_groups_seed_moves_trials_only_within_day_and_bucket():
    trials = {"train": records(range(20, 180))}
    plans = [plan_groups(trials, 4, 2, seed) for seed in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]
    for bucket in (0, 1):
        pools = [{t.trial_id for g in p.groups["train"] if g.bucket == bucket for t in g.trials} for p in plans]
        assert pools[0] == pools[2]


def test_plan_groups_within_a_bucket_mix_lengths():
    plan = plan_groups({"train": records(range(20, 180))}, 4, 1, 0)
    spreads = [max(t.input_bins for t in g.trials) - min(t.input_bins for t in g.trials) for g in plan.groups["train"]]
    assert np.mean(spreads) > 30
