"""The reduction inside the graph and the one between processes compute the same training."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import losses, make_groups, state, train

KEYS = ["train.steps=4", "optimizer.clip_norm=0.5"]
WAYS = {
    (accumulation, sharded): [f"train.accumulation={accumulation}", f"optimizer.sharded={str(sharded).lower()}"]
    for accumulation in (1, 2)
    for sharded in (False, True)
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Groups, and the run directory of a training on them with one rank."""
    folder = tmp_path_factory.mktemp("worlds")
    groups = make_groups(folder, num_buckets=1)
    train(groups, folder / "alone", keys=KEYS)
    return groups, folder / "alone"


@pytest.fixture(scope="module")
def threads(alone, tmp_path_factory):
    """What each of four ranks found that were threads of one process, for each way to train."""
    output = tmp_path_factory.mktemp("threads") / "found.pt"
    script = Path(__file__).parent / "thread_ranks.py"
    refused = {"refused by all": "train.steps=2 refuse=0,1,2,3", "refused by one": "train.steps=2 refuse=2"}
    trainings = {**{way: " ".join(keys) for way, keys in WAYS.items()}, **refused}
    command = [sys.executable, script, alone[1] / "config.toml", "4", output, *trainings.values()]
    subprocess.run(command, check=True, timeout=240)
    return dict(zip(trainings, torch.load(output, weights_only=True), strict=True))


@pytest.mark.parametrize(("accumulation", "sharded"), WAYS)
def test_graph_world_of_threads_trains_like_processes_and_like_one_rank(
    alone, threads, tmp_path, accumulation, sharded
):
    groups, one_rank = alone
    ranks = threads[accumulation, sharded]
    first = ranks[0]
    for rank in ranks:
        # One graph for a bucket, and with accumulation one more to apply; none again, none that another rank compiled.
        assert rank["counts"] == (accumulation, 0, 0)
        assert rank["losses"] == first["losses"]
        for when in ("initial", "final"):
            for parameter, weight in rank[when].items():
                assert torch.equal(weight, first[when][parameter]), parameter
    expected = vars(state(one_rank))
    num_values = 3 * sum(weight.numel() for weight in expected["weights"].values())
    assert [round(num_values / rank["held"], 1) for rank in ranks] == [4 if sharded else 1] * 4

    train(groups, tmp_path / "processes", cores=2, keys=[*KEYS, *WAYS[accumulation, sharded]])
    found = {
        "processes": (losses(tmp_path / "processes"), vars(state(tmp_path / "processes"))),
        "threads": (first["losses"], first["state"]),
    }
    for course, ended_as in found.values():
        np.testing.assert_allclose(course, losses(one_rank), rtol=2e-5)
        for part in ("weights", "moment1", "moment2"):
            for parameter, tensor in expected[part].items():
                np.testing.assert_allclose(
                    ended_as[part][parameter], tensor, rtol=1e-3, atol=2e-5, err_msg=f"{part} of {parameter}"
                )


def test_graph_world_refused_for_hbm_on_every_core_goes_on_in_micro_steps_from_the_same_state(threads):
    whole, smaller = threads[1, False], threads[2, False]
    for rank, found in enumerate(threads["refused by all"]):
        assert found["refused"] == [0, 1, 2, 3]
        assert found["counts"] == (2, 0, 0), "a micro-step and applying; the graph that was refused never compiled"
        assert found["losses"] == smaller[rank]["losses"][:2]
        for parameter, weight in found["initial"].items():
            assert torch.equal(weight, whole[rank]["initial"][parameter]), parameter


def test_graph_world_refused_for_hbm_on_one_core_alone_ends_every_rank_with_the_way_on(threads):
    errors = [found["error"] for found in threads["refused by one"]]
    assert len(errors) == 4
    for rank, (what, where, _) in enumerate(errors):
        assert what.startswith("out of HBM on some ranks alone, while the others wait for them inside the graph")
        assert ("Used 2G of 1G" in what) == (rank == 2)
        assert where == "the core's memory"
