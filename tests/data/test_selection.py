"""Any part of a folder of groups, each trial as it was stored and none besides; wrong wishes are told."""

from dataclasses import replace

import numpy as np
import pytest

from xla_b2t.config import DataConfig
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.selection import ARRAYS, columns_of, open_selected, select
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError

SIZE = 4


@pytest.fixture(scope="module", params=[1, 3])
def group_set(request, tmp_path_factory):
    """Groups of 3 days, mixed ones among them, in 1 or 3 passes; blocks are made up: 0 to 3, by the trial's length."""
    folder = tmp_path_factory.mktemp("selection")
    synthesize(folder / "trials", SynthSettings(sessions=3, trials=37, features=16, seed=5, bins_per_phoneme=4.0))
    settings = PrebatchSettings(group_size=SIZE, num_buckets=3, patch_bins=4, patch_stride=2, num_passes=request.param)
    prebatch(folder / "trials", folder / "groups", settings)
    opened = open_group_set(folder / "groups")
    splits = {
        name: replace(index, blocks_GB=np.where(index.valid_GB, index.input_bins_GB % 4, -1).astype(np.int32))
        for name, index in opened.splits.items()
    }
    return replace(opened, splits=splits)


def selected(group_set, **wishes):
    return select(group_set, DataConfig(dir=group_set.folder, **wishes))


def trials_of(group_set, split="train"):
    """Every trial that is read, by pass: name -> features, day, labels, bins; empty slots must be empty."""
    index = group_set.splits[split]
    passes = {int(number): {} for number in np.unique(index.pass_G)}
    with GroupReader(group_set, split) as reader:
        for group, bucket in enumerate(index.bucket_G):
            batch = reader.read([group], int(bucket))
            assert batch.features_BTC.shape[2] == group_set.num_features
            assert batch.valid_B.any()
            for slot, name in enumerate(batch.trial_ids):
                values = [getattr(batch, column)[slot] for column in vars(batch) if column != "trial_ids"]
                if not batch.valid_B[slot]:
                    assert name == "" and not any(np.any(value) for value in values)
                    continue
                assert name not in passes[int(index.pass_G[group])]
                bins, label = batch.input_bins_B[slot], batch.label_lengths_B[slot]
                passes[int(index.pass_G[group])][name] = (
                    batch.features_BTC[slot, :bins].copy(),
                    int(batch.days_B[slot]),
                    batch.labels_BL[slot, :label].tolist(),
                    int(bins),
                )
    return passes


def same_trials(found, expected, columns=slice(None)):
    assert found.keys() == expected.keys()
    for name, (features, *rest) in found.items():
        np.testing.assert_array_equal(features, expected[name][0][:, columns])
        assert tuple(rest) == expected[name][1:]


def test_select_of_nothing_in_particular_is_everything(group_set):
    found = selected(group_set)
    assert found.columns is None and found.num_features == 16
    assert found.splits == group_set.splits


@pytest.mark.parametrize("days", [[0], [1], [0, 2]])
def test_select_sessions_keeps_their_trials_as_they_are_and_drops_empty_groups(group_set, days):
    found = selected(group_set, sessions=tuple(group_set.sessions[day] for day in days))
    assert found.sessions == group_set.sessions
    for split in group_set.splits:
        everything, kept = trials_of(group_set, split), trials_of(found, split)
        assert kept.keys() == everything.keys()
        for number, trials in kept.items():
            same_trials(trials, {name: trial for name, trial in everything[number].items() if trial[1] in days})
        index = found.splits[split]
        assert index.num_valid_G.min() >= 1
        assert set(index.days_GB[index.valid_GB]) == set(days)


def test_select_sessions_by_glob_is_those_that_match(group_set):
    months = {session[:11] for session in group_set.sessions}
    for month in months:
        found = selected(group_set, sessions=(f"{month}*",)).splits["train"]
        expected = {day for day, session in enumerate(group_set.sessions) if session.startswith(month)}
        assert set(found.days_GB[found.valid_GB]) == expected


def test_select_blocks_keeps_their_trials(group_set):
    found = selected(group_set, blocks=(1, 3))
    for number, trials in trials_of(found).items():
        same_trials(trials, {name: t for name, t in trials_of(group_set)[number].items() if t[3] % 4 in (1, 3)})


def test_select_features_reads_those_columns_in_their_order(group_set):
    found = selected(group_set, features=("12-14", "0-3", "2-5", "8"))
    assert found.columns == ((0, 6), (8, 9), (12, 15))
    assert (found.num_features, found.stored_features) == (10, 16)
    columns = [*range(6), 8, 12, 13, 14]
    for number, trials in trials_of(found, "val").items():
        same_trials(trials, trials_of(group_set, "val")[number], columns)


def test_select_sessions_and_features_and_a_fold_together(group_set):
    found = selected(group_set, sessions=(group_set.sessions[1],), features=("4-7",), folds=2, fold=1)
    everything = trials_of(group_set)[0]
    of_day = {name for name, trial in everything.items() if trial[1] == 1}
    held = trials_of(found, "val")[0]
    for trials in trials_of(found).values():
        assert trials.keys() | held.keys() == of_day and not trials.keys() & held.keys()
        same_trials(trials, {name: everything[name] for name in trials}, slice(4, 8))


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_select_folds_hold_out_every_trial_once_and_never_train_on_it(group_set, folds):
    everything = trials_of(group_set)[0]
    held_out = []
    for fold in range(folds):
        found = selected(group_set, folds=folds, fold=fold)
        (held,) = trials_of(found, "val").values()
        same_trials(held, {name: everything[name] for name in held})
        held_out += held
        passes = trials_of(found)
        assert len(passes) == len(np.unique(group_set.splits["train"].pass_G))
        for trials in passes.values():
            same_trials(trials, {name: trial for name, trial in everything.items() if name not in held})
    assert sorted(held_out) == sorted(everything)


def test_select_fold_is_of_whole_groups_of_every_bucket(group_set):
    train = group_set.splits["train"]
    is_first_G = train.pass_G == 0
    checksums = {int(checksum): trials for checksum, trials in zip(train.checksum_G, train.num_valid_G, strict=True)}
    for fold in range(3):
        held = selected(group_set, folds=3, fold=fold).splits["val"]
        # Stored so: no slot of a group that is held out is empty but those that always were.
        assert [checksums[int(checksum)] for checksum in held.checksum_G] == held.num_valid_G.tolist()
        for bucket in np.unique(train.bucket_G):
            there = np.count_nonzero(is_first_G & (train.bucket_G == bucket))
            assert abs(np.count_nonzero(held.bucket_G == bucket) - there / 3) < 1


def test_select_one_pass_folds_leave_the_slots_of_training_as_full_as_they_were(group_set):
    train = group_set.splits["train"]
    if train.pass_G.max() > 0:
        pytest.skip("with several passes trials are held out of groups that are trained on")
    found = selected(group_set, folds=3, fold=0).splits
    assert len(found["train"].bucket_G) + len(found["val"].bucket_G) == len(train.bucket_G)
    assert found["train"].num_valid_G.sum() + found["val"].num_valid_G.sum() == train.num_valid_G.sum()


def test_select_padding_efficiency_is_of_what_is_selected(group_set):
    found = selected(group_set, sessions=(group_set.sessions[0],))
    index = found.splits["train"]
    stored = sum(group_set.buckets[bucket].input_bins for bucket in index.bucket_G) * SIZE
    assert found.padding_efficiency("train") == pytest.approx(index.input_bins_GB.sum() / stored)
    assert found.padding_efficiency("train") < group_set.padding_efficiency("train")


def test_open_selected_opens_the_folder_of_the_configuration(group_set):
    found = open_selected(DataConfig(dir=group_set.folder, features=("0-3",)))
    assert (found.folder, found.num_features) == (group_set.folder, 4)


def test_columns_of_arrays_are_threshold_crossings_and_spike_band_power_of_their_electrodes():
    assert columns_of(["area_4"], 512) == ((64, 128), (320, 384))
    assert columns_of(["dorsal_6v", "ventral_6v"], 512) == ((0, 64), (192, 320), (448, 512))
    assert columns_of(ARRAYS, 512) is None and columns_of([], 512) is None
    assert columns_of(["0-255"], 512) == ((0, 256),)


@pytest.mark.parametrize(
    ("wishes", "what", "where", "fix"),
    [
        ({"sessions": ("t15.2023.08.1",)}, "no session 't15.2023.08.1'", "data.sessions", "did you mean t15.2023.08.1"),
        ({"sessions": ("monday",)}, "no session 'monday'", "data.sessions", "the 3 sessions are t15.2023.08.11 to"),
        ({"blocks": (9,)}, "no block 9", "data.blocks", "did you mean 3? the blocks are 0, 1, 2, 3"),
        (
            {"features": ("0-16",)},
            "no columns 0-16: the groups have 16",
            "data.features",
            "give ranges within",
        ),
        ({"features": ("7-2",)}, "no columns 7-2", "data.features", "lower end first"),
        ({"features": ("area4",)}, "no array 'area4'", "data.features", "did you mean area_4?"),
        ({"features": ("left",)}, "no array 'left'", "data.features", "or columns such as 0-63"),
        ({"features": ("55b",)}, "one of 512 features; the groups have 16", "data.features", "such as 0-63"),
        ({"folds": 1}, "data.folds is 1 and data.fold is 0", "data.fold", "set data.folds=5"),
        ({"folds": 5, "fold": 5}, "data.folds is 5 and data.fold is 5", "data.fold", "data.fold to 0 ... 4"),
        ({"fold": 2}, "data.folds is 0 and data.fold is 2", "data.fold", "or both to 0"),
        ({"folds": 900}, "900 folds were asked for; there are", "data.folds", "use fewer folds"),
    ],
)
def test_select_impossible_wishes_are_user_errors(group_set, wishes, what, where, fix):
    with pytest.raises(UserError) as caught:
        selected(group_set, **wishes)
    assert what in caught.value.what
    assert caught.value.where == f"configuration: {where}"
    assert fix in caught.value.fix


def test_select_with_nothing_left_to_train_on_is_a_user_error(group_set):
    index = group_set.splits["train"]
    train = replace(index, blocks_GB=np.where(index.days_GB == 0, 7, index.blocks_GB))
    folder = replace(group_set, splits={**group_set.splits, "train": train})
    with pytest.raises(UserError) as caught:
        selected(folder, sessions=(group_set.sessions[1],), blocks=(7,))
    assert "no trial of train is of the sessions and blocks" in caught.value.what
    assert caught.value.where == "configuration: data.blocks"
    assert "leave them out for all" in caught.value.fix


def test_select_blocks_of_data_without_any_says_so(group_set):
    splits = {
        name: replace(index, blocks_GB=np.full_like(index.blocks_GB, -1)) for name, index in group_set.splits.items()
    }
    with pytest.raises(UserError) as caught:
        selected(replace(group_set, splits=splits), blocks=(1,))
    assert caught.value.what.startswith("there is no block 1 in ")
    assert caught.value.where == "configuration: data.blocks" and "leave data.blocks out" in caught.value.fix


def test_select_fold_without_training_trials_is_a_user_error(group_set):
    with pytest.raises(UserError) as caught:
        selected(replace(group_set, splits={"val": group_set.splits["val"]}), folds=2)
    assert "no split train" in caught.value.what
    assert caught.value.where == group_set.folder and caught.value.fix == "set data.folds=0"


def test_select_fold_of_several_passes_whose_names_cannot_be_read_names_the_file(group_set, tmp_path):
    train = group_set.splits["train"]
    if train.pass_G.max() == 0:
        pytest.skip("one pass needs no names")
    gone = replace(train, files=(str(tmp_path / "train-0000.h5"),) * len(train.files))
    with pytest.raises(UserError) as caught:
        selected(replace(group_set, splits={"train": gone}), folds=2)
    assert caught.value.what.startswith("the group cannot be read: ")
    assert caught.value.where.startswith(str(tmp_path / "train-0000.h5")) and "prebatch" in caught.value.fix
