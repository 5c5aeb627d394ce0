"""The reduction inside the graph and the one between processes compute the same training."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from xla_b2t.training.checkpoint import CheckpointFolder, load_file

sys.path.insert(0, str(Path(__file__).parent))
from test_run import make_groups, train


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_graph_world_of_threads_trains_like_processes_and_like_one_rank(tmp_path, accumulation, sharded):
    groups = make_groups(tmp_path, num_buckets=1)
    keys = ["train.steps=4", "optimizer.clip_norm=0.5", f"train.accumulation={accumulation}"]
    more = ["optimizer.sharded=true"] if sharded else []
    losses, states = {}, {}
    for name, cores in (("alone", 1), ("processes", 4)):
        train(groups, tmp_path / name, cores=cores, keys=[*keys, *(more if cores > 1 else [])])
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        losses[name] = [event["loss"] for event in events if event["kind"] == "train"]
        states[name] = vars(load_file(CheckpointFolder(tmp_path / name).find("latest")[0]).state)
    threads = train_threads(tmp_path / "alone" / "config.toml", tmp_path / "threads.pt", more)
    for rank in threads:
        # One graph for a bucket, and with accumulation one more to apply; none again, none that another rank compiled.
        assert rank["counts"] == (accumulation, 0, 0)
        assert rank["losses"] == threads[0]["losses"]
        for when in ("initial", "final"):
            for parameter, weight in rank[when].items():
                assert torch.equal(weight, threads[0][when][parameter]), parameter
    losses["threads"], states["threads"] = threads[0]["losses"], threads[0]["state"]
    num_values = 3 * sum(weight.numel() for weight in states["alone"]["weights"].values())
    assert [round(num_values / rank["held"], 1) for rank in threads] == [4 if sharded else 1] * 4
    for name in ("processes", "threads"):
        np.testing.assert_allclose(losses[name], losses["alone"], rtol=2e-5)
        for part in ("weights", "moment1", "moment2"):
            for parameter, tensor in states["alone"][part].items():
                np.testing.assert_allclose(
                    states[name][part][parameter], tensor, rtol=1e-3, atol=2e-5, err_msg=f"{part} of {parameter}"
                )


def train_threads(config, output, keys):
    """What each of four ranks found that were threads of one process."""
    script = Path(__file__).parent / "thread_ranks.py"
    subprocess.run([sys.executable, str(script), str(config), "4", str(output), *keys], check=True, timeout=240)
    return torch.load(output, weights_only=True)
