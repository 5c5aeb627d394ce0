"""Whole runs through the command line: ranks are processes, as a user has them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xla_b2t.data.groups import open_group_set
from xla_b2t.memory import host_memory

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import arguments, call, call_apart, events, losses, make_groups, train, weights

NOISY = [
    "model.dtype=bfloat16", "model.options.dropout=0.2", "model.options.input_dropout=0.2",
    "augment.white_noise_std=0.5", "augment.constant_offset_std=0.2", "augment.start_shift_bins=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("one"), num_buckets=1)


@pytest.fixture(scope="module")
def groups_3(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("three"), num_buckets=3)


@pytest.fixture(scope="module")
def alone(groups, tmp_path_factory):
    """The run directory of six updates on one rank, and its summary. Its stdout is the summary and nothing else."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    done = call_apart("xla_b2t.launch", *arguments(groups, run_dir, "--json", preflight=True))
    assert done.returncode == 0, done.stderr
    return run_dir, json.loads(done.stdout)


def test_run_on_1_2_4_and_8_ranks_gives_one_loss_curve(groups, alone, tmp_path):
    expected, summary = losses(alone[0]), alone[1]
    assert (summary["cores"], summary["steps"], summary["status"], summary["world"]) == (1, 6, "completed", "cpu")
    assert len(expected) == 6
    assert expected[-1] < expected[0]
    for cores in (2, 4, 8):
        run_dir = tmp_path / f"r{cores}"
        summary = train(groups, run_dir, cores=cores)
        assert (summary["cores"], summary["steps"], summary["global_batch"]) == (cores, 6, 64)
        np.testing.assert_allclose(losses(run_dir), expected, rtol=2e-5)
        for name, weight in weights(run_dir).items():
            np.testing.assert_allclose(weight, weights(alone[0])[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_run_with_accumulation_equals_one_large_batch(groups, alone, tmp_path):
    summary = train(groups, tmp_path / "parts", keys=["train.accumulation=4"])
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(alone[0]), rtol=2e-5)
    assert summary["compiles"] == 2, "a micro-step and applying, however many micro-steps there are"


def test_run_summary_has_every_key_that_others_read(alone):
    assert set(alone[1]) >= {
        "status", "steps", "cores", "world", "val_per", "best_val_per", "val_per_by_day", "train_loss_first",
        "train_loss_last", "trials_per_second", "step_ms_median", "compiles", "compiles_after_warmup",
        "host_fallbacks", "padding_efficiency", "seconds", "resumed_from",
    }  # fmt: skip
    assert {"start", "preflight", "compile", "train", "validate", "checkpoint"} == set(alone[1]["seconds"])


HALVED = """
from xla_b2t.config import decode
from xla_b2t.models.gru_decoder import GruDecoder, GruDecoderOptions


class Halved(GruDecoder):
    def forward(self, *inputs):
        return super().forward(*inputs)._replace(weight=0.5)


def build(sizes, options):
    return Halved(sizes, decode(GruDecoderOptions, options, "options", "options"))
"""


def test_run_logs_the_loss_that_validation_measures_beside_what_it_minimises(groups, alone, tmp_path):
    (tmp_path / "halved.py").write_text(HALVED)
    keys = [f"model.factory={tmp_path}/halved.py:build", "train.steps=1"]
    summary = train(groups, tmp_path / "run", keys=keys)
    event = events(tmp_path / "run")[0]
    assert event["loss"] == pytest.approx(losses(alone[0])[0], rel=1e-6)
    assert event["objective"] == pytest.approx(0.5 * event["loss"], rel=1e-6)
    assert summary["train_loss_first"] == summary["train_loss_last"] == event["loss"]


def test_run_of_two_epochs_in_three_buckets_compiles_each_graph_once(groups_3, tmp_path):
    keys = [*NOISY, "train.global_batch=16", "validation.every=5", "train.steps=22"]
    summary = train(groups_3, tmp_path / "run", keys=keys)
    buckets = {split: set(index.bucket_G.tolist()) for split, index in open_group_set(groups_3).splits.items()}
    assert buckets["train"] == {0, 1, 2}
    assert summary["compiles"] == len(buckets["train"]) + len(buckets["val"])
    assert (summary["compiles_after_warmup"], summary["host_fallbacks"]) == (0, 0)
    logged = events(tmp_path / "run")
    assert logged[-1]["step"] == 22
    assert max(event.get("epoch", 0) for event in logged) >= 2


def test_run_resumed_equals_the_uninterrupted_one(groups, tmp_path):
    train(groups, tmp_path / "whole", keys=NOISY)
    train(groups, tmp_path / "parts", keys=[*NOISY, "train.steps=3"])
    summary = train(groups, tmp_path / "parts", "--resume", keys=NOISY)
    assert (summary["resumed_from"], summary["steps"]) == (3, 6)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, weight in weights(tmp_path / "parts").items():
        np.testing.assert_array_equal(weight, weights(tmp_path / "whole")[name], err_msg=name)


def test_run_with_sharded_state_resumed_without_on_other_ranks_equals_the_uninterrupted_one(groups, alone, tmp_path):
    train(groups, tmp_path / "run", cores=2, keys=["train.steps=3", "optimizer.sharded=true"])
    summary = train(groups, tmp_path / "run", "--resume", cores=3)
    assert (summary["resumed_from"], summary["steps"], summary["cores"]) == (3, 6, 3)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(alone[0]), rtol=2e-5)
    for name, weight in weights(tmp_path / "run").items():
        np.testing.assert_allclose(weight, weights(alone[0])[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_run_dir_that_holds_a_run_is_not_overwritten(groups, alone, tmp_path):
    shutil.copytree(alone[0], tmp_path / "run")
    shown = call("train", *arguments(groups, tmp_path / "run", keys=["train.steps=1"]))
    assert shown.returncode == 2
    assert "this directory holds a run" in shown.stderr
    assert "--resume" in shown.stderr
    assert losses(tmp_path / "run") == losses(alone[0])
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(groups, tmp_path / "run", "--overwrite", keys=["train.steps=1"])
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert len(losses(tmp_path / "run")) == 1


def test_run_dir_with_files_of_others_is_left_alone(groups, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "theirs.pt").write_text("theirs")
    (tmp_path / "run" / "config.toml").write_text("theirs = 1")
    shown = call("train", *arguments(groups, tmp_path / "run"))
    assert shown.returncode == 2
    assert "this directory holds checkpoints, and no run to go on with" in shown.stderr
    assert (tmp_path / "run" / "checkpoints" / "theirs.pt").read_text() == "theirs"
    assert (tmp_path / "run" / "config.toml").read_text() == "theirs = 1"


def test_resume_that_is_refused_leaves_the_run_as_it_was(groups, groups_3, alone, tmp_path):
    shutil.copytree(alone[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for other, options, what in (
        (groups_3, ["train.steps=9"], "groups of the conversion"),
        (groups, ["train.steps=9", "run.seed=3"], "run.seed: found 3"),
        (groups, ["train.steps=6"], "the run has 6 updates already"),
    ):
        shown = call("train", *arguments(other, tmp_path / "run", "--resume", keys=options))
        assert shown.returncode == 2, shown.stderr
        assert what in shown.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_run_dir_that_holds_a_run_survives_a_refused_overwrite(alone, tmp_path):
    shutil.copytree(alone[0], tmp_path / "run")
    shown = call("train", *arguments(tmp_path / "nowhere", tmp_path / "run", "--overwrite"))
    assert shown.returncode == 2
    assert "nowhere" in shown.stderr
    assert losses(tmp_path / "run") == losses(alone[0])


USERS_MODEL = """
import torch
from torch import nn
from xla_b2t.models.protocol import DecoderOutput

class Linear(nn.Module):
    def __init__(self, sizes, width):
        super().__init__()
        self.hidden = nn.Linear(sizes.num_features, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.num_classes)
    def forward(self, features_BTC, input_bins_B, days_B):
        hidden = torch.relu(self.norm(self.hidden(features_BTC)))
        return DecoderOutput(self.head(hidden), input_bins_B.clamp(min=1))
    def output_steps(self, input_bins):
        return max(input_bins, 1)

def build(sizes, options):
    return Linear(sizes, **options)
"""


def test_run_with_a_users_own_model_trains_and_evaluates(groups, tmp_path):
    (tmp_path / "my_model.py").write_text(USERS_MODEL)
    config = tmp_path / "own.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[data]\ndir = "{groups}"\n[model]\nfactory = "{tmp_path}/my_model.py:build"\n'
        "options = { width = 12 }\n[train]\nsteps = 4\nglobal_batch = 32\nlog_every = 1\n[validation]\nevery = 4\n"
        "[optimizer]\neps = 1e-6\nrate = { peak = 1e-2, final = 1e-3, warmup_steps = 0, decay_steps = 10 }\n"
    )
    shown = call("train", "--config", config, "--json", "--cores", 2)
    assert shown.returncode == 0, shown.stderr
    summary = json.loads(shown.stdout)
    assert summary["train_loss_last"] < summary["train_loss_first"]
    assert (summary["compiles_after_warmup"], summary["host_fallbacks"]) == (0, 0)
    assert 0 < summary["val_per"] <= 2


def test_run_whose_model_reads_the_core_stops_and_names_the_operation(groups, tmp_path):
    model = USERS_MODEL.replace("torch.relu(", "torch.logaddexp(features_BTC.sum(-1, keepdim=True), ")
    (tmp_path / "my_model.py").write_text(model)
    keys = [f"model.factory={tmp_path}/my_model.py:build", "model.options={ width = 12 }", f"run.dir={tmp_path}/run"]
    config = tmp_path / "own.toml"
    config.write_text(f'[data]\ndir = "{groups}"\n[validation]\nevery = 0\n')
    shown = call("train", "--no-preflight", "--config", config, *(option for key in keys for option in ("--set", key)))
    assert shown.returncode == 2, shown.stderr
    assert "aten::logaddexp" in shown.stderr
    assert "my_model.py:" in shown.stderr
    assert "--allow-recompile" in shown.stderr


def test_run_evaluated_again_gives_the_same_rate_on_any_number_of_ranks(groups_3, tmp_path):
    keys = ["train.steps=3", "validation.every=3"]
    summary = train(groups_3, tmp_path / "run", cores=2, keys=keys)
    results = []
    for cores in (1, 3):
        output = tmp_path / f"{cores}.jsonl"
        shown = call("evaluate", tmp_path / "run", "--json", "--cores", cores, "--output", output)
        assert shown.returncode == 0, shown.stderr
        results.append(json.loads(shown.stdout))
    assert results[0]["per"] == results[1]["per"] == pytest.approx(summary["best_val_per"], abs=1e-9)
    assert results[0]["per_by_day"] == pytest.approx(summary["val_per_by_day"])
    assert (tmp_path / "1.jsonl").read_text().count("\n") == results[0]["trials"] > 0


def test_evaluate_of_test_split_writes_sequences_without_labels(groups, alone, tmp_path):
    output = tmp_path / "out" / "test.jsonl"
    shown = call("evaluate", alone[0], "--split", "test", "--checkpoint", "latest", "--output", output)
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    num_trials = int(open_group_set(groups).splits["test"].num_valid_G.sum())
    assert len(lines) == len({line["trial"] for line in lines}) == num_trials > 0
    assert all(line["reference"] is None and isinstance(line["phonemes"], list) for line in lines)


def test_evaluate_with_a_head_that_the_model_lacks_says_so(alone):
    shown = call("evaluate", alone[0], "--checkpoint", "latest", "--head", "loud")
    assert shown.returncode == 2, shown.stderr
    assert "there is no auxiliary head 'loud'; known: none" in shown.stderr
    assert "where: forward of GruDecoder" in shown.stderr
    assert "fix:   leave --head away" in shown.stderr


def test_run_interrupted_leaves_no_rank_and_says_where_to_go_on(groups, tmp_path):
    # That every signal ends every rank is shown in tests/xla/test_spawn.py.
    words = arguments(groups, tmp_path / "run", cores=3, keys=["train.steps=100000", "train.checkpoint_every=2"])
    command = [sys.executable, "-m", "xla_b2t.launch", *words]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "manifest.json").exists() and time.monotonic() < until:
        time.sleep(0.2)
    ranks = [pid for pid in _pids_with("forkserver") if str(parent.pid) in _ancestors(pid)]
    assert len(ranks) >= 3
    began = time.monotonic()
    parent.send_signal(signal.SIGINT)
    _, shown = parent.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert parent.returncode == 130
    last = shown.strip().splitlines()[-1]
    assert "interrupted by SIGINT" in last and "--resume" in last
    until = time.monotonic() + 5
    while any(_is_running(pid) for pid in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in ranks if _is_running(pid)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_run_with_fewer_groups_than_ranks_says_how_many_are_needed(groups, tmp_path):
    shown = call("train", *arguments(groups, tmp_path / "run", cores=11))
    assert shown.returncode == 2
    assert "at least 11" in shown.stderr and "fewer --cores" in shown.stderr


def test_run_with_damaged_group_names_file_and_group(groups, tmp_path):
    copy = tmp_path / "groups"
    shutil.copytree(groups, copy)
    content = bytearray((copy / "train-0000.h5").read_bytes())
    content[len(content) // 2] ^= 255
    (copy / "train-0000.h5").write_bytes(content)
    shown = call("train", *arguments(copy, tmp_path / "run", cores=2))
    assert shown.returncode == 2, shown.stderr
    assert "checksum" in shown.stderr and "train-0000.h5:/groups/" in shown.stderr


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _pids_with(text):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text in (path / "cmdline").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _ancestors(pid):
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(str(pid))
    return found


def test_run_on_a_selection_trains_and_validates_on_it_alone_and_is_evaluated_so(groups, tmp_path):
    session = open_group_set(groups).sessions[1]
    keys = [
        f'data.sessions=["{session}"]',
        'data.features=["0-7"]',
        "data.folds=3",
        "data.fold=1",
        "validation.every=2",
    ]
    run_dir = tmp_path / "run"
    summary = train(groups, run_dir, cores=2, keys=[*keys, "train.global_batch=16", "train.steps=2"])
    assert list(summary["val_per_by_day"]) == [session]
    evaluated = json.loads(call("evaluate", run_dir, "--json").stdout)
    assert evaluated["per"] == pytest.approx(summary["val_per"])
    out = tmp_path / "all.jsonl"
    everything = json.loads(call("evaluate", run_dir, "--data", groups, "--output", out, "--json").stdout)
    assert set(everything["per_by_day"]) == set(open_group_set(groups).sessions)
    assert all("/val/" in json.loads(line)["trial"] for line in out.read_text().splitlines())
    resumed = call("train", *arguments(groups, run_dir, "--resume", keys=[*keys[:3], "data.fold=2", "train.steps=4"]))
    assert resumed.returncode == 2 and "data.fold: found 2, expected 1" in resumed.stderr


def test_run_says_what_host_memory_it_needs_and_does_not_start_where_there_is_less(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "find_available", lambda: host_memory.Available(10**9, "MemAvailable"))
    done = call("train", *arguments(groups, tmp_path / "run"))
    assert done.returncode == 2
    assert "this run needs 1.4 GB of host memory: 1 rank x (process 0.70" in done.stderr
    assert "there are 1.0 GB available (MemAvailable)" in done.stderr and "data.prefetch_mb" in done.stderr
    assert not (tmp_path / "run" / "config.toml").exists()
    monkeypatch.setattr(host_memory, "find_available", lambda: None)
    done = call("train", *arguments(groups, tmp_path / "run", keys=["train.steps=1"]))
    assert done.returncode == 0 and "preflight: 1.4 GB of host memory" in done.stderr
    assert "not checked: neither /proc/meminfo nor a cgroup" in done.stderr
