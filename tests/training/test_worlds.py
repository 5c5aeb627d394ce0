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

SHARDED = "optimizer.sharded=true"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_world_trains_like_one_rank_also_with_sharded_state(tmp_path, accumulation):
    groups = make_groups(tmp_path, num_buckets=1)
    keys = ["train.steps=4", "optimizer.clip_norm=0.5", f"train.accumulation={accumulation}"]
    losses, states = {}, {}
    for name, cores, more in (("alone", 1, []), ("processes", 4, []), ("sharded processes", 4, [SHARDED])):
        train(groups, tmp_path / name, cores=cores, keys=[*keys, *more])
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        losses[name] = [event["loss"] for event in events if event["kind"] == "train"]
        states[name] = vars(load_file(CheckpointFolder(tmp_path / name).find("latest")[0]).state)
    for name, more in (("threads", []), ("sharded threads", [SHARDED])):
        ranks = train_threads(tmp_path / "alone" / "config.toml", tmp_path / "threads.pt", more)
        for rank in ranks:
            # One graph for a bucket, and with accumulation one more to apply; none again, none another rank compiled.
            assert rank["counts"] == (accumulation, 0, 0)
            assert rank["losses"] == ranks[0]["losses"]
            for when in ("initial", "final"):
                for parameter, weight in rank[when].items():
                    assert torch.equal(weight, ranks[0][when][parameter]), parameter
        losses[name], states[name] = ranks[0]["losses"], ranks[0]["state"]
        num_values = 3 * sum(weight.numel() for weight in states[name]["weights"].values())
        parts = 4 if more else 1
        assert [round(num_values / rank["held"], 1) for rank in ranks] == [parts] * 4
    for name, world in (("processes", "alone"), ("threads", "alone")):
        assert_close(losses[name], states[name], losses[world], states[world], loss_rtol=2e-5, rtol=1e-3, atol=2e-5)
    for name, world in (("sharded processes", "processes"), ("sharded threads", "threads")):
        assert_close(losses[name], states[name], losses[world], states[world], loss_rtol=1e-6, rtol=1e-5, atol=5e-6)


def train_threads(config, output, keys):
    """What each of four ranks found that were threads of one process."""
    script = Path(__file__).parent / "thread_ranks.py"
    subprocess.run([sys.executable, str(script), str(config), "4", str(output), *keys], check=True, timeout=240)
    return torch.load(output, weights_only=True)


def assert_close(losses, state, expected_losses, expected_state, loss_rtol, rtol, atol):
    np.testing.assert_allclose(losses, expected_losses, rtol=loss_rtol)
    for part in ("weights", "moment1", "moment2"):
        for name, tensor in expected_state[part].items():
            np.testing.assert_allclose(state[part][name], tensor, rtol=rtol, atol=atol, err_msg=f"{part} {name}")
