"""Whole runs through the command line at a small size, and what they leave; used by the tests of several files.

A command runs in the process of the tests. Its ranks are processes, as a user has them, forked from one server that has
torch loaded for all of them: to load it takes longer than most of these runs. That `python -m` starts the same, in a
process of its own, is shown by some tests of test_run.py.
"""

import contextlib
import io
import json
import subprocess
import sys
from typing import NamedTuple

from xla_b2t.cli import main
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.training.checkpoint import CheckpointFolder, load_file

CONFIG = """
[data]
dir = "{groups}"
[model]
dtype = "float32"
[model.options]
patch_bins = 4
patch_stride = 2
hidden = 16
layers = 1
dropout = 0.0
input_dropout = 0.0
[augment]
white_noise_std = 0.0
constant_offset_std = 0.0
start_shift_bins = 0
[optimizer]
eps = 1e-6
rate = {{ peak = 1e-2, final = 1e-3, warmup_steps = 2, decay_steps = 40 }}
day_rate = {{ peak = 1e-2, final = 1e-3, warmup_steps = 2, decay_steps = 40 }}
[train]
steps = 6
global_batch = 64
log_every = 1
[validation]
every = 0
"""


class Ended(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def call(*words):
    """Runs a command of `xla_b2t` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Ended(code, out.getvalue(), err.getvalue())


def call_apart(module, *words):
    """Runs `python -m MODULE` in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def arguments(groups, run_dir, *more, cores=1, keys=(), preflight=False):
    """The words after `train`: the configuration above, with some keys changed.

    The preflight is a process that loads torch_xla, which takes longer than most runs here: the first run has it.
    """
    config = run_dir.parent / f"{run_dir.name}.toml"
    config.write_text(CONFIG.format(groups=groups))
    options = [option for key in [f"run.dir={run_dir}", *keys] for option in ("--set", key)]
    without = [] if preflight else ["--no-preflight"]
    return ["--config", str(config), "--cores", str(cores), *without, *options, *more]


def train(groups, run_dir, *more, cores=1, keys=()):
    """Runs to the end and returns summary.json."""
    done = call("train", *arguments(groups, run_dir, "--json", *more, cores=cores, keys=keys))
    crashes = [path.read_text() for path in sorted((run_dir / "crash").glob("*.txt"))]
    assert done.returncode == 0, "\n".join([done.stderr, *crashes])
    return json.loads(done.stdout)


def make_groups(folder, num_buckets):
    """Folder of groups of 8 from 40 simulated trials of 2 sessions."""
    trials = folder / "trials"
    synthesize(trials, SynthSettings(sessions=2, trials=40, features=16, seed=3, bins_per_phoneme=3.0, signal=1.0))
    settings = PrebatchSettings(num_buckets=num_buckets, patch_bins=4, patch_stride=2, group_size=8)
    prebatch(trials, folder / "groups", settings)
    return folder / "groups"


def events(run_dir):
    """What the run logged."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def losses(run_dir):
    """Of each update that was logged."""
    return [event["loss"] for event in events(run_dir) if event["kind"] == "train"]


def state(run_dir):
    """The latest checkpoint's weights and moments."""
    return load_file(CheckpointFolder(run_dir).find("latest")[0]).state


def weights(run_dir):
    """The latest checkpoint's weights, by name."""
    return state(run_dir).weights
