"""What one rank raises when it, or another, is out of HBM: the others' votes are given."""

import threading

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.xla.attempt import OutOfHbm, attempt, who
from xla_b2t.xla.device import sync, to_device, to_host
from xla_b2t.xla.world import Alone, Graph

HBM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2G of 1G hbm."
RAN, REFUSED = 0, 1

pytestmark = pytest.mark.usefixtures("xla_device")


class Beside(Alone):
    """A rank 0 beside others, whose votes are given for every time that it is asked; None is a silent rank."""

    def __init__(self, *votes):
        super().__init__("cpu")
        self.given, self.asked = list(votes), []

    def votes(self, vote, patience_s=None):
        self.asked.append((vote, patience_s))
        others = self.given.pop(0)
        if others is None:
            raise TimeoutError
        return [vote, *others]


def adding(state, error=None):
    """One step on the core that adds 1, and how it ends."""

    def run():
        state.add_(1)
        if error:
            raise error
        sync()
        return state

    return run


def make():
    return to_device([torch.zeros(2)])[0]


def test_attempt_that_every_rank_ran_leaves_its_result():
    state, world = make(), Beside([RAN, RAN])
    attempt(world, [state], adding(state), reduces=False)
    assert to_host([state])[0].tolist() == [1, 1]
    assert world.asked == [(RAN, None)]


def test_attempt_refused_on_this_rank_puts_the_state_back_and_says_why():
    state = make()
    with pytest.raises(OutOfHbm) as caught:
        attempt(Beside([RAN, RAN]), [state], adding(state, RuntimeError(HBM)), reduces=False)
    assert (caught.value.ranks, caught.value.text) == ([0], HBM.partition(": ")[2])
    sync()
    assert to_host([state])[0].tolist() == [0, 0]


def test_attempt_refused_on_other_ranks_is_undone_here():
    with pytest.raises(OutOfHbm) as caught:
        attempt(Beside([REFUSED, RAN, REFUSED]), [], adding(make()), reduces=False)
    assert (caught.value.ranks, caught.value.text) == ([1, 3], "")


def test_attempt_with_a_reduction_refused_on_every_rank_is_undone_before_anything_is_waited_for():
    state, world = make(), Beside([REFUSED])
    with pytest.raises(OutOfHbm) as caught:
        attempt(world, [state], adding(state, RuntimeError(HBM)), reduces=True)
    assert caught.value.ranks == [0, 1]
    assert world.asked == [(REFUSED, None)]


@pytest.mark.parametrize(
    ("error", "votes", "said"),
    [
        (None, [[REFUSED]], "rank 1 was refused"),
        (RuntimeError(HBM), [[RAN]], "Used 2G of 1G"),
    ],
)
def test_attempt_with_a_reduction_refused_on_some_ranks_ends_with_the_way_on(error, votes, said):
    state = make()
    with pytest.raises(UserError) as caught:
        attempt(Beside(*votes), [state], adding(state, error), reduces=True, fix="go on with --resume")
    assert "out of HBM on some ranks alone, while the others wait for them inside the graph" in caught.value.what
    assert said in caught.value.what
    assert (caught.value.where, caught.value.fix) == ("the core's memory", "go on with --resume")


def test_attempt_that_fails_while_it_runs_waits_only_so_long_for_ranks_inside_the_graph(monkeypatch):
    def fail(tensors):
        raise RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 8.00M. That was not possible. (0x0x0_HBM0)")

    monkeypatch.setattr("xla_b2t.xla.attempt.to_host", fail)
    state, world = make(), Beside([RAN], None)
    with pytest.raises(UserError, match=r"on some ranks alone.*Attempting to allocate 8.00M"):
        attempt(world, [], adding(state), reduces=True, fix="go on with --resume")
    assert world.asked == [(RAN, None), (REFUSED, 60.0)]
    with pytest.raises(UserError) as caught:
        attempt(Beside([RAN]), [state], adding(state), reduces=False, fix="go on with --resume")
    assert "out of HBM while a step ran (rank 0), and the weights that it was given are gone" in caught.value.what
    assert (caught.value.where, caught.value.fix) == ("the core's memory", "go on with --resume")


@pytest.mark.parametrize("error", [ValueError("shapes"), MemoryError(), RuntimeError("std::bad_alloc"), KeyError("a")])
def test_attempt_that_fails_otherwise_raises_it_and_asks_nobody(error):
    world = Beside()
    with pytest.raises(type(error)) as caught:
        attempt(world, [], adding(make(), error), reduces=True)
    assert caught.value is error
    assert world.asked == []


def test_ranks_in_words():
    assert (who([3]), who([0, 2])) == ("rank 3", "ranks 0, 2")


def core(rank, size, folder):
    world = object.__new__(Graph)  # as on a TPU host, which tells a rank its number
    world.rank, world.size, world._meeting_place, world._num_votes = rank, size, str(folder), 0
    return world


def test_votes_of_cores_reach_every_rank_each_time(tmp_path):
    found = {}

    def vote(rank):
        world = core(rank, 3, tmp_path)
        found[rank] = [world.votes(number + rank) for number in (0, 5)]

    ranks = [threading.Thread(target=vote, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [found[rank] for rank in range(3)] == [[[0, 1, 2], [5, 6, 7]]] * 3


def test_vote_that_a_core_does_not_give_is_not_waited_for_longer_than_asked(tmp_path):
    with pytest.raises(TimeoutError, match=r"no vote of every rank within 0.1 s"):
        core(0, 2, tmp_path).votes(1, patience_s=0.1)
