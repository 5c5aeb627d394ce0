"""State that is spread over the ranks is trained, saved and gone on with as if every rank held all of it."""

import sys
from pathlib import Path

import pytest
import torch

from xla_b2t.xla import spawn
from xla_b2t.xla.cut import cut_evenly
from xla_b2t.xla.machine import Machine

sys.path.insert(0, str(Path(__file__).parent))
import shard_targets

CLIPPING = "optimizer.clip_norm=0.05"
SHARDED = "optimizer.sharded=true"


def train(folder, name, num_ranks, keys, resumed_from="", num_steps=4):
    """Trains the small model; returns what its ranks wrote, and where."""
    output = str(folder / f"{name}.pt")
    args = (output, [CLIPPING, *keys], resumed_from, num_steps)
    spawn.run(shard_targets.train, args, Machine("cpu", 1), num_ranks, folder / "crash")
    return torch.load(output, weights_only=True), output


def assert_same_state(found, expected, rtol, atol):
    assert found["steps"] == expected["steps"]
    for part, tensors in expected["state"].items():
        assert list(found["state"][part]) == list(tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                found["state"][part][name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, "bfloat16"), (3, "bfloat16"), (6, "float32")])
def test_sharded_training_equals_unsharded(tmp_path, num_ranks, dtype):
    keys = [f"model.dtype={dtype}"]
    whole, _ = train(tmp_path, "whole", num_ranks, keys)
    parts, _ = train(tmp_path, "parts", num_ranks, [*keys, SHARDED])
    assert min(whole["norms"]) > 0.1, "or nothing was clipped"
    # With one rank nothing differs; with more, the squares of the gradient are added up in another order.
    assert_same_state(parts, whole, *((0, 0) if num_ranks == 1 else (1e-5, 1e-7)))
    torch.testing.assert_close(parts["norms"], whole["norms"], rtol=1e-6, atol=0)
    for name, weight in parts["state"]["weights"].items():
        assert torch.equal(parts["parameters"][name], weight.to(getattr(torch, dtype)))
    # The micro-step and applying, or all in one: as many graphs as without.
    assert parts["counts"] == whole["counts"] == (2, 0, 0)
    shapes = [tuple(weight.shape) for weight in parts["state"]["weights"].values()]
    assert () in shapes and (6, 6) in shapes
    sizes = [torch.Size(cut_evenly(shape, num_ranks).part_shape).numel() for shape in shapes]
    assert parts["held"] == [size for size in sizes for _ in range(3)]
    zeros = sum(parts["held"]) * num_ranks - sum(whole["held"])
    assert 0 <= zeros < 3 * num_ranks * 6 * len(shapes), "beside zeros at the ends of axes, a rank holds 1/R"


@pytest.mark.parametrize(("before", "after"), [((3, [SHARDED]), (2, [])), ((2, []), (3, [SHARDED]))])
def test_state_saved_one_way_goes_on_the_other_way_and_on_other_ranks(tmp_path, before, after):
    keys = ["model.dtype=float32"]
    uninterrupted, _ = train(tmp_path, "uninterrupted", 1, keys)
    _, half = train(tmp_path, "half", before[0], [*keys, *before[1]], num_steps=2)
    found, _ = train(tmp_path, "found", after[0], [*keys, *after[1]], half, num_steps=2)
    assert_same_state(found, uninterrupted, rtol=1e-4, atol=1e-6)


def test_state_saved_sharded_is_read_back_exactly(tmp_path):
    keys = ["model.dtype=bfloat16", SHARDED]
    uninterrupted, _ = train(tmp_path, "uninterrupted", 3, keys)
    saved, half = train(tmp_path, "half", 3, keys, num_steps=2)
    for num_ranks, more in ((2, ["optimizer.sharded=false"]), (6, [])):
        again, _ = train(tmp_path, "again", num_ranks, [*keys, *more], half, num_steps=0)
        assert_same_state(again, saved, 0, 0)
    resumed, _ = train(tmp_path, "resumed", 3, keys, half, num_steps=2)
    assert_same_state(resumed, uninterrupted, 0, 0)
