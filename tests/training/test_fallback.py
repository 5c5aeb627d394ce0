"""Cores whose memory is too small: whole runs in which one rank is refused, in the words of a TPU."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.data.groups import open_group_set
from xla_b2t.errors import UserError
from xla_b2t.training.fallback import (
    explaining,
    fall_back,
    limits_in_words,
    memory_keys,
    way_out,
    way_out_of_decoding,
)
from xla_b2t.training.loop import Job, run_rank
from xla_b2t.training.summary import Course
from xla_b2t.xla.attempt import OutOfHbm
from xla_b2t.xla.device_memory import MemoryUse
from xla_b2t.xla.world import Alone

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import arguments, call, events, losses, make_groups, train, weights

HBM = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 2G of 1G hbm."
RUNNING = (
    "RESOURCE_EXHAUSTED: Attempting to allocate 180.59M. That was not possible. There are 142.58M free.; (0x0x0_HBM0)"
)
VMEM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem."
HOST = "std::bad_alloc"
NOISE = ["model.options.dropout=0.2", "augment.white_noise_std=0.5", "augment.start_shift_bins=2"]

MODEL = '''
"""A model that compiles fast, on a core that takes so many trials: options.limit says how many, and how it refuses."""

import torch
import torch.distributed as dist
import torch_xla
from torch import nn

from xla_b2t.evaluation import decode as decoding
from xla_b2t.models.protocol import DecoderOutput
from xla_b2t.training import step
from xla_b2t.xla import attempt, device


class Limited(nn.Module):
    def __init__(self, sizes, limit):
        super().__init__()
        self.limit = limit
        self.hidden, self.head = nn.Linear(sizes.num_features, 12), nn.Linear(12, sizes.num_classes)
        self.dropout = nn.Dropout(limit["dropout"])

    def output_steps(self, input_bins):
        return max(input_bins, 1)

    def forward(self, features_BTC, input_bins_B, days_B):
        self.calls = getattr(self, "calls", 0) + 1
        limit, rank = self.limit, dist.get_rank() if dist.is_initialized() else 0
        is_refused = rank == limit["rank"] and len(features_BTC) > limit["most"] and self.calls > limit["after"]
        if self.training == limit["training"] and is_refused:
            if limit["how"] == "traced":
                raise RuntimeError(limit["text"])
            if limit["how"] == "compiled":
                step.sync = decoding.sync = self.refuse
            if limit["how"] == "updated":
                step.optimizer.update = self.refuse_update
            if limit["how"] == "run":
                attempt.to_host = self.fail
        hidden = self.dropout(torch.relu(self.hidden(features_BTC)))
        return DecoderOutput(self.head(hidden), input_bins_B.clamp(min=1))

    def refuse_update(self, *arguments):
        raise RuntimeError(self.limit["text"])

    def refuse(self):
        """As a compiler does it: torch_xla has forgotten by then what was traced."""
        step.sync = decoding.sync = device.sync
        torch_xla._XLAC._set_allow_execution(False)
        try:
            device.sync()
        except RuntimeError:
            raise RuntimeError(self.limit["text"]) from None
        finally:
            torch_xla._XLAC._set_allow_execution(True)

    def fail(self, tensors):
        """As a core does it that has been given a graph, and the buffers to overwrite."""
        attempt.to_host = device.to_host
        device.to_host(tensors)
        raise RuntimeError(self.limit["text"])


def build(sizes, options):
    return Limited(sizes, {"rank": 0, "after": 0, "training": True, **options["limit"], "dropout": options["dropout"]})
'''


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("one"), num_buckets=1)


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """Gives the keys of a run on cores of a limited memory."""
    path = tmp_path_factory.mktemp("model") / "limited.py"
    path.write_text(MODEL)

    def keys(most, how="compiled", text=HBM, **limit):
        values = {"most": most, "how": how, "text": text, **limit}
        words = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
        return [f"model.factory={path}:build", f"model.options.limit={{ {words} }}"]

    return keys


def fallbacks(run_dir):
    return [event for event in events(run_dir) if event["kind"] == "fallback"]


def assert_same_weights(run_dir, other):
    for name, weight in weights(run_dir).items():
        np.testing.assert_array_equal(weight, weights(other)[name], err_msg=name)


@pytest.fixture(scope="module")
def smaller(groups, limited, tmp_path_factory):
    """The run directory of six updates without noise, in two micro-steps from the start."""
    run_dir = tmp_path_factory.mktemp("smaller") / "run"
    train(groups, run_dir, keys=[*limited(32), "train.accumulation=2"])
    return run_dir


def test_one_rank_of_eight_out_of_hbm_at_compile_lets_all_go_on_with_half(groups, smaller, limited, tmp_path):
    summary = train(groups, tmp_path / "run", cores=8, keys=[*limited(4, rank=5), "train.steps=2"])
    assert (summary["batch_size"], summary["accumulation"], summary["global_batch"]) == (4, 2, 64)
    assert (summary["compiles_after_warmup"], summary["status"]) == (0, "completed")
    (event,) = fallbacks(tmp_path / "run")
    assert (event["ranks"], event["step"], event["batch_size_before"], event["batch_size"]) == ([5], 0, 8, 4)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(smaller)[:2], rtol=2e-5)


def test_run_that_falls_back_at_its_first_step_is_the_run_that_starts_smaller(groups, limited, tmp_path):
    smaller = [*NOISE, *limited(4), "train.steps=2", "train.batch_size=4", "train.accumulation=2"]
    train(groups, tmp_path / "smaller", cores=2, keys=smaller)
    assert fallbacks(tmp_path / "smaller") == []
    for how in ("traced", "compiled"):
        keys = [*NOISE, *limited(4, how, rank=1), "train.steps=2", "train.global_batch=16"]
        train(groups, tmp_path / how, cores=2, keys=keys)
        assert [event["batch_size"] for event in fallbacks(tmp_path / how)] == [4]
        assert losses(tmp_path / how) == losses(tmp_path / "smaller")
        assert_same_weights(tmp_path / how, tmp_path / "smaller")


def test_one_rank_of_eight_out_of_hbm_while_running_is_agreed_on_and_resumed_smaller(
    groups, smaller, limited, tmp_path
):
    limit = limited(4, "run", RUNNING, rank=1, after=2)
    train(groups, tmp_path / "run", cores=8, keys=[*limit, "train.steps=4"])
    (event,) = fallbacks(tmp_path / "run")
    assert (event["ranks"], event["step"], event["batch_size"], event["accumulation"]) == ([1], 2, 4, 2)
    summary = train(groups, tmp_path / "run", "--resume", cores=2, keys=limit)
    assert (summary["batch_size"], summary["accumulation"], summary["resumed_from"]) == (4, 8, 4)
    assert len(fallbacks(tmp_path / "run")) == 1, "a resumed run does not try again what was refused"
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(smaller), rtol=2e-5)
    lifted = [*limit, "optimizer.sharded=true", "train.steps=7"]
    summary = train(groups, tmp_path / "run", "--resume", cores=2, keys=lifted)
    assert summary["batch_size"] == 32, "more may fit when the state is shared"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (VMEM, "a smaller batch does not cure: Ran out of memory in memory space vmem", "model.options.kernel=false"),
        (HOST, "out of host memory, which a smaller batch on the core does not cure: std::bad_alloc", "fewer --cores"),
    ],
)
def test_one_rank_of_eight_out_of_another_memory_ends_the_run_and_says_so(groups, limited, tmp_path, text, what, fix):
    done = call("train", *arguments(groups, tmp_path / "run", cores=8, keys=limited(1, text=text, rank=6)))
    assert done.returncode == 2, done.stderr
    assert what in done.stderr
    assert "where: step 1" in done.stderr
    assert fix in done.stderr.partition("fix: ")[2]
    assert fallbacks(tmp_path / "run") == []
    assert (tmp_path / "run" / "crash" / "rank-6.txt").exists()


def test_one_rank_of_eight_out_of_hbm_in_the_update_ends_all_with_what_can_help(groups, limited, tmp_path):
    done = call("train", *arguments(groups, tmp_path / "run", cores=8, keys=limited(1, "updated", rank=3)))
    assert done.returncode == 2, done.stderr
    assert "out of HBM, in the update of the parameters, which takes as much with a smaller batch: Ran" in done.stderr
    assert "where: step 1, its update" in done.stderr
    fix = done.stderr.partition("fix: ")[2].strip()
    assert fix.startswith("share the state among the cores with optimizer.sharded=true, or train fewer parameters")
    assert "xla_b2t plan-memory" in fix and "train.batch_size" not in fix
    assert fallbacks(tmp_path / "run") == []


def test_single_trials_out_of_hbm_end_the_run_with_what_was_tried(groups, limited, tmp_path):
    done = call("train", *arguments(groups, tmp_path / "run", keys=[*limited(0, "traced"), "train.global_batch=16"]))
    assert done.returncode == 2, done.stderr
    assert "out of HBM with a single trial at a time (rank 0); tried were 16, 8, 4, 2, 1 trials a core" in done.stderr
    assert "where: step 1, bucket of" in done.stderr
    assert "xla_b2t plan-memory" in done.stderr and "optimizer.sharded=true" in done.stderr
    assert [event["batch_size"] for event in fallbacks(tmp_path / "run")] == [8, 4, 2, 1]


def test_one_graph_that_is_refused_leaves_weights_and_moments_as_they_were(groups, limited, tmp_path):
    keys = [*NOISE, *limited(32), "train.steps=2"]
    summary = train(groups, tmp_path / "fallen", keys=keys)
    assert (summary["batch_size"], summary["accumulation"]) == (32, 2)
    assert (summary["compiles"], summary["compiles_after_warmup"]) == (2, 0)
    train(groups, tmp_path / "smaller", keys=[*keys, "train.accumulation=2"])
    assert losses(tmp_path / "fallen") == losses(tmp_path / "smaller")
    assert_same_weights(tmp_path / "fallen", tmp_path / "smaller")


def test_one_graph_that_fails_while_it_runs_says_that_the_weights_are_gone_and_how_to_go_on(groups, limited, tmp_path):
    done = call("train", *arguments(groups, tmp_path / "run", keys=limited(32, "run", RUNNING)))
    assert done.returncode == 2, done.stderr
    assert "out of HBM while a step ran (rank 0), and the weights that it was given are gone" in done.stderr
    assert "Attempting to allocate 180.59M" in done.stderr
    assert "--resume --set train.batch_size=32 --set train.accumulation=2" in done.stderr


def test_one_rank_of_eight_out_of_hbm_in_decoding_decodes_fewer_and_gives_the_same_rate(limited, tmp_path):
    groups = make_groups(tmp_path, num_buckets=2)
    limit = limited(4, rank=1, training=False, after=2)  # a bucket of the split has been started by then
    summary = train(
        groups,
        tmp_path / "run",
        cores=8,
        keys=["train.steps=2", "validation.every=1", "validation.split=train", *limit],
    )
    (event,) = fallbacks(tmp_path / "run")
    assert (event["phase"], event["before"], event["after"], event["ranks"]) == ("validate", 8, 4, [1])
    assert event["input_bins"] == open_group_set(groups).buckets[1].input_bins
    assert (summary["batch_size"], summary["compiles_after_warmup"]) == (8, 0)
    first, second = (event for event in events(tmp_path / "run") if event["kind"] == "val")
    path = tmp_path / "run" / "checkpoints" / "step-00000001.pt"
    done = call("evaluate", tmp_path / "run", "--json", "--split", "train", "--checkpoint", path)
    assert json.loads(done.stdout)["per"] == pytest.approx(first["per"], abs=1e-9), "decoded by one rank at once"
    words = ("--json", "--split", "train", "--checkpoint", "latest", "--cores", 2, "--batch-size", 32)
    done = call("evaluate", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["per"] == pytest.approx(second["per"], abs=1e-9)
    assert result["trials"] == int(open_group_set(groups).splits["train"].num_valid_G.sum())


def test_single_trial_out_of_hbm_in_decoding_ends_the_run_with_what_was_said(groups, limited, tmp_path):
    keys = [*limited(0, training=False), "train.steps=1", "validation.every=1", "validation.batch_size=8"]
    done = call("train", *arguments(groups, tmp_path / "run", keys=keys))
    assert done.returncode == 2, done.stderr
    said = "Ran out of memory in memory space hbm. Used 2G of 1G hbm."
    assert "out of HBM when decoding a single trial of" in done.stderr and f"on rank 0: {said}" in done.stderr
    assert "val" in done.stderr.partition("where: ")[2] and "xla_b2t plan-memory" in done.stderr
    assert [(event["after"], event["text"]) for event in fallbacks(tmp_path / "run")] == [(n, said) for n in (4, 2, 1)]


@pytest.mark.parametrize(("most", "planned_bytes"), [(64, 9 * 2**28), (32, None)])
def test_memory_in_use_is_told_once_and_beside_the_plan_of_its_batch_alone(
    groups, limited, tmp_path, monkeypatch, capsys, xla_device, most, planned_bytes
):
    reading = MemoryUse(17 * 2**27, 63 * 2**28, 5 * 2**29)
    monkeypatch.setattr("xla_b2t.training.memory_log.read_memory_use", lambda: reading)
    arguments(groups, tmp_path / "run")
    config = configuration.load(tmp_path / "run.toml", [f"run.dir={tmp_path}/run", "train.steps=2", *limited(most)])
    run_rank(Alone("cpu"), Job(config, "", False, {}, time.time(), planned_bytes=9 * 2**28))
    shown = capsys.readouterr().err
    assert shown.count("HBM in use 2.1 of 15.8 GiB, 2.5 at its peak") == 1
    assert ("(planned 2.25)" in shown) == bool(planned_bytes)
    (event,) = [event for event in events(tmp_path / "run") if event["kind"] == "memory"]
    assert (event["used_bytes"], event["limit_bytes"]) == (17 * 2**27, 63 * 2**28)
    assert (event["peak_bytes"], event["planned_bytes"], event["step"]) == (5 * 2**29, planned_bytes, 1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["batch_size"] == most and not [name for name in summary if name.startswith(("largest", "limited"))]


@pytest.mark.parametrize(
    ("key", "holds"),
    [
        ("train.steps=9", True),
        ("run.cores=4", True),
        ("train.batch_size=32", False),
        ("train.accumulation=2", False),
        ("validation.batch_size=8", False),
        ("optimizer.sharded=true", False),
        ("data.prefetch_mb=7", False),
        ("model.options.kernel=false", False),
    ],
)
def test_limits_hold_until_a_key_changes_that_decides_what_fits(key, holds):
    course = Course()
    course.keep_limits(memory_keys(configuration.load(None, ["train.global_batch=64"])))
    course.largest_batch, course.largest_validation_batch = 16, 4
    resumed = Course(**asdict(course))
    resumed.keep_limits(memory_keys(configuration.load(None, ["train.global_batch=64", key])))
    assert (resumed.largest_batch, resumed.largest_validation_batch) == ((16, 4) if holds else (None, None))


def test_limits_in_words_name_what_lifts_them():
    assert limits_in_words(None, None) == ""
    words = limits_in_words(16, 4)
    assert words.startswith("more than 16 trials a core, 4 in decoding did not fit before; it is tried again after a")
    assert "train.batch_size" in words and "optimizer.sharded" in words


@pytest.mark.parametrize(("trials", "fix"), [(64, "give --batch-size 32; see"), (48, "give --batch-size 24; see")])
def test_way_out_of_decoding_is_half_in_whole_groups(trials, fix):
    assert way_out_of_decoding("--batch-size ", trials, group_size=8).startswith(fix)


@pytest.mark.parametrize("trials", [0, 1, 8, 12])
def test_way_out_of_decoding_of_a_group_at_most_is_the_plan(trials):
    assert way_out_of_decoding("--batch-size ", trials, group_size=8).startswith("see what takes the memory with")


def plan(num_ranks=8, **train):
    keys = [f"train.{key}={value}" for key, value in train.items()]
    return plan_batches(configuration.load(None, keys), group_size=8, num_ranks=num_ranks)


def test_fallback_in_words_says_what_is_tried_and_what_stays():
    fallback = fall_back(plan(global_batch=512), OutOfHbm([0, 3], "Used 2G"), 16, 2475, plan(global_batch=512))
    assert fallback.in_words() == (
        "out of HBM in the bucket of 2475 bins at 64 trials a core (ranks 0, 3): going on with 32 trials x 2 "
        "micro-steps; the effective batch of 512 is unchanged; retrying step 17"
    )


@pytest.mark.parametrize(
    ("before", "fix"),
    [
        (plan(global_batch=512), "with --resume --set train.batch_size=32 --set train.accumulation=2; see what takes"),
        (plan(global_batch=72), "with --resume --set train.global_batch=72 --set train.accumulation=2; see what takes"),
        (plan(batch_size=1, accumulation=8), "see what takes the memory with xla_b2t plan-memory"),
        (None, "share the state among the cores with optimizer.sharded=true; see what takes"),
    ],
)
def test_rank_out_of_hbm_where_none_can_fall_back_is_told_the_way_on(before, fix):
    with pytest.raises(UserError) as caught, explaining(lambda: way_out(before), lambda: "step 7"):
        raise RuntimeError(RUNNING)
    assert "out of HBM, at a place where ranks cannot fall back: Attempting to allocate 180.59M" in caught.value.what
    assert caught.value.where == "step 7"
    assert fix in caught.value.fix


@pytest.mark.parametrize("error", [ValueError("shapes"), UserError(HBM, "told", "already"), OutOfHbm([0], "")])
def test_error_that_is_not_of_memory_is_left_as_it_is(error):
    with pytest.raises(type(error)) as caught, explaining(str, lambda: "step 7"):
        raise error
    assert caught.value is error
