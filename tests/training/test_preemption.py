"""A run that is asked to end leaves a checkpoint, and going on from it is as if nobody had asked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import arguments, call, events, losses, make_groups, state, train

KEYS = [
    "model.options.dropout=0.2", "augment.white_noise_std=0.5", "augment.start_shift_bins=2", "train.steps=40",
    "train.global_batch=40", "validation.every=12",
]  # fmt: skip


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("one"), num_buckets=1)


@pytest.fixture(scope="module")
def whole(groups, tmp_path_factory):
    """The run that nobody asked to end."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(groups, run_dir, cores=2, keys=KEYS)
    return run_dir


def start(groups, run_dir, *more):
    words = arguments(groups, run_dir, *more, cores=2, keys=KEYS)
    command = [sys.executable, "-m", "xla_b2t.launch", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(found, process):
    until = time.monotonic() + 120
    while not (result := found()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    return result


def step_of(run_dir):
    path = run_dir / "events.jsonl"
    return max([json.loads(line)["step"] for line in path.read_text().splitlines()[:-1]], default=0)


def ranks_of(parent):
    """Processes of ranks: they lead a group each, and descend from the parent's fork server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        pid, leads = int(path.parent.name), fields[2] == path.parent.name
        if leads and b"forkserver" in command and parent.pid in ancestors(pid):
            found.append(pid)
    return sorted(found)


def ancestors(pid):
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


@pytest.mark.parametrize("who", ["parent", "rank 0", "rank 1"])
def test_run_that_gets_sigterm_saves_and_goes_on_as_if_it_had_not(groups, whole, tmp_path, who):
    run_dir = tmp_path / "run"
    process = start(groups, run_dir)
    wait_for(lambda: (run_dir / "events.jsonl").exists() and step_of(run_dir) >= 3, process)
    pid = process.pid if who == "parent" else ranks_of(process)[int(who[-1])]
    os.kill(pid, signal.SIGTERM)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 75, shown
    assert "interrupted by SIGTERM, all ranks are gone; the last checkpoint is of step" in shown
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 3 <= summary["steps"] < 40
    saved = [event["step"] for event in events(run_dir) if event["kind"] == "checkpoint"]
    assert saved[-1] == summary["steps"]
    assert not list(run_dir.rglob("*.partial"))
    # What watches a run may be set anew; it is the same run.
    keys = [*KEYS, "train.agreement_every=5", "train.most_skipped_in_a_row=3", "run.most_restarts=9"]
    summary = train(groups, run_dir, "--resume", "auto", cores=2, keys=keys)
    assert (summary["status"], summary["steps"], summary["resumed_from"]) == ("completed", 40, saved[-1])
    assert losses(run_dir) == losses(whole)
    for column in ("weights", "moment1", "moment2"):
        for name, tensor in getattr(state(run_dir), column).items():
            assert tensor.equal(getattr(state(whole), column)[name]), (column, name)


def test_run_that_is_asked_before_its_first_update_ends_without_a_checkpoint(groups, tmp_path):
    run_dir = tmp_path / "run"
    process = start(groups, run_dir)
    wait_for(lambda: len(ranks_of(process)) == 2, process)
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 75, shown
    assert "interrupted by SIGTERM" in shown
    assert train(groups, run_dir, "--resume", "auto", cores=2, keys=[*KEYS, "train.steps=2"])["status"] == "completed"


def test_run_that_is_started_again_and_again_without_coming_further_stops(groups, tmp_path):
    keys = ["train.steps=2", "run.most_restarts=2", "validation.every=1", "validation.split=absent"]
    words = ["train", *arguments(groups, tmp_path / "run", "--resume", "auto", keys=keys)]
    for number in range(3):
        shown = call(*words).stderr
        assert "absent" in shown
        assert (f"restart {number} of this run, from step 0" in shown) == (number > 0)
    shown = call(*words)
    assert shown.returncode == 2
    assert "started again 2 times in a row without coming further than step 0" in shown.stderr
