"""Ranks start, compute together, and end together however one of them ends."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xla_b2t.errors import UserError
from xla_b2t.xla import spawn
from xla_b2t.xla.machine import Machine

sys.path.insert(0, str(Path(__file__).parent))
import rank_targets

CPU = Machine("cpu", 1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_run_reduces_over_all_ranks(tmp_path, num_ranks):
    spawn.run(rank_targets.write_sums, (str(tmp_path),), CPU, num_ranks, tmp_path / "crash")
    n = num_ranks
    total = n * (n + 1)
    ranks = n * (n - 1) // 2
    expected = (
        [[total] * 3, [[2 * ranks, 0], [0, 2 * ranks]]],
        [n, ranks],
        [10 * rank for rank in range(n)],
        [True, False],
    )
    found = [ast.literal_eval((tmp_path / f"{rank}.txt").read_text()) for rank in range(n)]
    assert found == [expected] * n
    assert not (tmp_path / "crash").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exception", "rank 1 failed: ValueError: a fault on rank 1"),
        ("exit", "rank 1 ended with exit code 7 and no report"),
        ("SIGKILL", "rank 1 was killed by SIGKILL (probably the machine ran out of memory)"),
        ("SIGSEGV", "rank 1 was killed by SIGSEGV"),
    ],
)
def test_run_with_a_rank_that_dies_names_it_and_ends_the_rest(tmp_path, how, message):
    began = time.monotonic()
    with pytest.raises(spawn.RankError) as caught:
        spawn.run(rank_targets.fail_on_rank_one, (how,), CPU, 3, tmp_path / "crash")
    assert message in str(caught.value)
    assert time.monotonic() - began < 60, "the ranks that waited were not ended"
    assert not [pid for pid in _descendants(os.getpid()) if "rank" in _command(pid)]
    if how == "exception":
        report = (tmp_path / "crash" / "rank-1.txt").read_text()
        assert "ValueError: a fault on rank 1" in report and "fail_on_rank_one" in report


def test_run_with_a_user_error_in_a_rank_raises_it_again(tmp_path):
    with pytest.raises(UserError) as caught:
        spawn.run(rank_targets.fail_on_rank_one, ("user error",), CPU, 2, tmp_path / "crash")
    assert caught.value.args == ("found 3", "file.h5", "give 4")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_when_the_parent_is_signalled_leaves_no_rank(tmp_path, number):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rank_targets\n"
        "from xla_b2t.xla import spawn; from xla_b2t.xla.machine import Machine\n"
        "folder = sys.argv[2]\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        spawn.run(rank_targets.sleep_after_mark, (folder,), Machine('cpu', 1), 3, folder + '/crash')\n"
        "    except spawn.Interrupted as error: print('interrupted by', error.args[0])\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pids = [_wait_for(tmp_path / f"{rank}.pid") for rank in range(3)]
    parent.send_signal(number)
    shown, _ = parent.communicate(timeout=30)
    assert shown.strip() == ("" if number == signal.SIGKILL else f"interrupted by {int(number)}")
    until = time.monotonic() + 5
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)


@pytest.fixture
def pretended_tpu(monkeypatch):
    """torch_xla's own launcher on the CPU: one process with a rank a thread, as on a v3 host."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    return Machine("tpu", 2)


def test_run_on_tpu_path_starts_a_rank_a_thread_through_xmp_spawn(tmp_path, pretended_tpu):
    spawn.run(rank_targets.write_rank, (str(tmp_path),), pretended_tpu, 2, tmp_path / "crash")
    found = [ast.literal_eval((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)]
    assert [size for size, _, _ in found] == [2, 2]
    assert found[0][1] == found[1][1] != os.getpid()
    assert not any(is_main for _, _, is_main in found)


def test_run_on_tpu_path_with_a_failing_rank_names_it_and_ends_the_rest(tmp_path, pretended_tpu):
    with pytest.raises(spawn.RankError, match="rank 1 failed: ValueError: a fault on rank 1"):
        spawn.run(rank_targets.fail_on_rank_one_of_threads, (), pretended_tpu, 2, tmp_path / "crash")
    assert "fail_on_rank_one_of_threads" in (tmp_path / "crash" / "rank-1.txt").read_text()
    time.sleep(0.5)
    assert not [pid for pid in _descendants(os.getpid()) if "spawn_main" in _command(pid)]


def _wait_for(path):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.1)
    raise TimeoutError(f"{path.name} did not appear")


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _descendants(pid):
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children = [int(line.split()[0]) for line in shown.splitlines() if int(line.split()[1]) == pid]
    return children + [deeper for child in children for deeper in _descendants(child)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""
