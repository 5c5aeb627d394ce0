import numpy as np

from xla_b2t.data.grouping import TrialRecord, plan_groups


def records(lengths, day=0, split="train", labels=3):
    return [
        TrialRecord(f"day{day}/{split}/trial_{i:04d}", day, day, int(length), 8, (1,) * labels, labels)
        for i, length in enumerate(lengths)
    ]


def test_plan_groups_every_trial_lies_in_one_group_of_its_day_and_fits():
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
            assert {trial.day for trial in group.trials} == {group.day}
            assert 1 <= len(group.trials) <= 4
            assert max(trial.input_bins for trial in group.trials) <= plan.buckets[group.bucket].input_bins
        assert [group.day for group in groups] == sorted(group.day for group in groups)
    longest = max(record.input_bins for of_split in trials.values() for record in of_split)
    assert plan.buckets[-1].input_bins >= longest


def test_plan_groups_incomplete_group_is_the_shortest_of_its_day():
    plan = plan_groups({"train": records([100, 20, 110, 120, 130])}, group_size=4, num_buckets=2, seed=0)
    assert [(len(g.trials), plan.buckets[g.bucket].input_bins) for g in plan.groups["train"]] == [(1, 32), (4, 144)]


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
