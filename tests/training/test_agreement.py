"""Ranks with other weights, or another schedule, are found and named."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from xla_b2t.data.groups import open_group_set
from xla_b2t.data.schedule import Schedule
from xla_b2t.training.agreement import check_same_schedule, check_same_weights
from xla_b2t.xla.world import Alone

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import make_groups, train


class Pretended(Alone):
    """Two more ranks that hold what is given."""

    def __init__(self, others, check=check_same_weights):
        super().__init__("cpu")
        self.size = 3
        self._others, self._check = others, check

    def sum(self, values):
        found = [values]
        for rank, theirs in enumerate(self._others, start=1):
            recorder = Recorder(rank, self.size)
            self._check(theirs, recorder)
            found.append(recorder.sent)
        return np.sum(found, axis=0)


class Recorder(Alone):
    """Keeps what a rank would send; every rank then seems to agree."""

    def __init__(self, rank, size):
        super().__init__("cpu")
        self.rank, self.size = rank, size

    def sum(self, values):
        self.sent = values
        return np.zeros_like(values)


def weights(change=0.0):
    return {"first": torch.ones(3), "second": torch.full((2, 2), 2.0 + change), "third": torch.zeros(1) + change}


def test_check_same_weights_of_equal_ranks_is_silent():
    check_same_weights(weights(), Pretended([weights(), weights()]))


def test_check_same_weights_names_rank_and_first_parameter():
    with pytest.raises(RuntimeError, match=r"ranks \[2\] hold other weights than rank 0; the first .* is second"):
        check_same_weights(weights(), Pretended([weights(), weights(change=1e-6)]))


def test_check_same_weights_takes_bfloat16_and_scalars():
    low = {"w": torch.ones(3).bfloat16(), "s": torch.tensor(2.0)}
    other = {**low, "w": torch.tensor([1, 1, 1.0078125]).bfloat16()}
    check_same_weights(low, Pretended([low, low]))
    with pytest.raises(RuntimeError, match=r"ranks \[1\] hold other weights than rank 0; the first .* is w"):
        check_same_weights(low, Pretended([other, low]))


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("one"), num_buckets=1)


def test_check_same_schedule_names_rank_and_what_differs(groups):
    index = open_group_set(groups).splits["train"]
    schedule = Schedule("epochs", index, 0, 4)
    elsewhere = Schedule("epochs", replace(index, split=index.split), 0, 4)
    check_same_schedule(schedule, Pretended([schedule, elsewhere], check_same_schedule))
    other_buckets = replace(index, bucket_G=index.bucket_G[::-1] + 1)
    for other, name in (
        (Schedule("epochs", other_buckets, 0, 4), r"index\.bucket_G"),
        (Schedule("epochs", index, 1, 4), "seed"),
        (Schedule("epochs", index, 0, 8), "groups_per_update"),
    ):
        with pytest.raises(RuntimeError, match=rf"ranks \[1\] follow another schedule than rank 0; .* is {name}"):
            check_same_schedule(schedule, Pretended([other, schedule], check_same_schedule))


def test_run_compares_weights_as_it_goes_and_compiles_nothing_for_that(groups, tmp_path):
    summary = train(groups, tmp_path / "run", cores=2, keys=["train.agreement_every=2", "model.dtype=bfloat16"])
    assert (summary["status"], summary["compiles"], summary["compiles_after_warmup"]) == ("completed", 2, 0)
