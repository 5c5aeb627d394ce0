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
def test_graph_world_of_threads_trains_like_processes_and_like_one_rank(tmp_path, accumulation):
    groups = make_groups(tmp_path, num_buckets=1)
    keys = ["train.steps=4", f"train.accumulation={accumulation}"]
    found = {}
    for name, cores in (("alone", 1), ("processes", 4)):
        train(groups, tmp_path / name, cores=cores, keys=keys)
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["kind"] == "train"]
        found[name] = losses, load_file(CheckpointFolder(tmp_path / name).find("latest")[0]).state.weights
    output = tmp_path / "threads.pt"
    config = tmp_path / "alone" / "config.toml"
    script = Path(__file__).parent / "thread_ranks.py"
    subprocess.run([sys.executable, str(script), str(config), "4", str(output)], check=True, timeout=240)
    threads = torch.load(output, weights_only=True)
    for rank in threads:
        # One graph for a bucket, and with accumulation one more to apply; none again, none that another rank compiled.
        assert rank["counts"] == (accumulation, 0, 0)
        assert rank["losses"] == threads[0]["losses"]
        for parameter, weight in rank["initial"].items():
            assert torch.equal(weight, threads[0]["initial"][parameter]), parameter
    found["threads"] = threads[0]["losses"], threads[0]["weights"]
    for name in ("processes", "threads"):
        np.testing.assert_allclose(found[name][0], found["alone"][0], rtol=2e-5)
        for parameter, weight in found["alone"][1].items():
            np.testing.assert_allclose(found[name][1][parameter], weight, rtol=1e-3, atol=2e-5, err_msg=parameter)
