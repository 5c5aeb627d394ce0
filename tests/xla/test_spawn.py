"""Ranks start, compute together, and end together however one of them ends."""

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from xla_b2t.errors import UserError
from xla_b2t.xla import spawn
from xla_b2t.xla.machine import Machine
from xla_b2t.xla.rank import _write_report, read_reports

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
    assert not _ranks_left()
    if how == "exception":
        report = (tmp_path / "crash" / "rank-1.txt").read_text()
        assert "ValueError: a fault on rank 1" in report and "fail_on_rank_one" in report
        assert {path.suffix for path in (tmp_path / "crash").iterdir()} == {".txt"}


def test_run_with_a_user_error_in_a_rank_raises_it_again(tmp_path):
    with pytest.raises(UserError) as caught:
        spawn.run(rank_targets.fail_on_rank_one, ("user error",), CPU, 2, tmp_path / "crash")
    assert caught.value.args == ("found 3", "file.h5", "give 4")


@pytest.mark.parametrize("trouble", ["no folder", "full disk"])
def test_run_where_no_crash_file_can_be_written_still_raises_the_first_error(tmp_path, trouble):
    if trouble == "no folder":
        (tmp_path / "file").touch()
        crash_dir = tmp_path / "file" / "crash"
    else:
        crash_dir = tmp_path / "crash"
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "rank-1.part").symlink_to("/dev/full")
        crash_dir.symlink_to(tmp_path / "full")
    with pytest.raises(spawn.RankError, match="rank 1 failed: ValueError: a fault on rank 1"):
        spawn.run(rank_targets.fail_on_rank_one, ("exception",), CPU, 3, crash_dir)


def test_write_report_where_nothing_can_be_written_does_not_raise(tmp_path, capsys):
    (tmp_path / "file").touch()
    _write_report("rank 1", str(tmp_path / "none"), tmp_path / "file" / "crash", ValueError("a fault"))
    shown = capsys.readouterr().err
    assert f"{tmp_path}/none/rank-1.json could not be written: No such file or directory\n" in shown
    assert f"{tmp_path}/file/crash/rank-1.txt could not be written: Not a directory\n" in shown
    assert "ValueError: a fault" in shown


def test_watch_waits_for_the_crash_file_of_a_rank_that_reported(tmp_path):
    report = {"name": "rank 1", "time": 1.0, "message": "m", "is_consequence": False, "user_error": None}
    assert spawn._failure({}, [report], tmp_path) is None
    assert spawn._failure({"rank 0": 0}, [report], tmp_path) is None
    assert str(spawn._failure({"rank 1": 1}, [report], tmp_path)) == "m"


class _Process:
    pid = 12345

    def __init__(self, alive):
        self.is_alive = lambda: alive


@pytest.mark.parametrize("refusal", [ProcessLookupError, PermissionError])
@pytest.mark.parametrize("alive", [True, False])
def test_signal_group_without_a_group_signals_only_the_living_and_never_raises(monkeypatch, refusal, alive):
    asked = []

    def refuse(pid, number):
        asked.append((pid, number))
        raise refusal

    monkeypatch.setattr(os, "killpg", lambda pid, number: refuse("group", number))
    monkeypatch.setattr(os, "kill", refuse)
    spawn._signal_group(_Process(alive), signal.SIGTERM)
    assert asked == [("group", signal.SIGTERM)] + [(12345, signal.SIGTERM)] * alive


PARENT = """
import sys; sys.path.insert(0, sys.argv[1]); import rank_targets
from xla_b2t.xla import spawn; from xla_b2t.xla.machine import Machine
folder = sys.argv[2]
if __name__ == '__main__':
    try:
        machine = Machine(sys.argv[3], 1)
        spawn.run(rank_targets.sleep_after_mark, (folder,), machine, int(sys.argv[4]), folder + '/crash')
    except spawn.Interrupted as error: print('interrupted by', error.args[0])
"""


@pytest.fixture
def start_parent(tmp_path):
    """Starts a process that runs ranks which sleep, marked by its environment."""
    parents = []

    def start(kind="cpu", num_ranks=3):
        (tmp_path / "parent.py").write_text(PARENT)
        command = [sys.executable, tmp_path / "parent.py", Path(__file__).parent, tmp_path, kind, str(num_ranks)]
        environ = {**os.environ, "CPU_NUM_DEVICES": "2", "RANKS_OF": str(tmp_path)}
        parents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
        return parents[0]

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def _all_of(folder):
    """Every process that `start_parent` led to, whoever adopted it."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _has_mark(path, folder)]


def _has_mark(path, folder):
    try:
        return f"RANKS_OF={folder}\0".encode() in path.read_bytes()
    except OSError:
        return False


def _assert_all_gone(folder, parent, number, within_s=15.0):
    """Signals, and waits. On a machine with nothing else to do all are gone within 5 s; a crowded one gets longer."""
    began = time.monotonic()
    parent.send_signal(number)
    shown, _ = parent.communicate(timeout=30)
    while left := _all_of(folder):
        if time.monotonic() > began + within_s:
            break
        time.sleep(0.05)
    assert not [_command(pid) for pid in left]
    assert time.monotonic() - began < within_s
    assert shown.strip() == ("" if number == signal.SIGKILL else f"interrupted by {int(number)}")


# SIGINT: below, and with ranks that train in tests/training/test_run.py.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_when_the_parent_is_signalled_leaves_no_rank(tmp_path, start_parent, number):
    parent = start_parent()
    for rank in range(3):
        _wait_for(tmp_path / f"{rank}.pid")
    _assert_all_gone(tmp_path, parent, number)


@pytest.mark.parametrize(("kind", "num_processes"), [("cpu", 3), ("cpu", 4), ("tpu", 3), ("tpu", 4)])
def test_run_when_the_parent_is_signalled_while_ranks_start_leaves_no_rank(tmp_path, start_parent, kind, num_processes):
    # cpu: parent, resource tracker, fork server, three ranks. tpu: parent, resource tracker, launcher, its process.
    parent = start_parent(kind)
    until = time.monotonic() + 60
    while len(_all_of(tmp_path)) < num_processes:
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.01)
    _assert_all_gone(tmp_path, parent, signal.SIGINT)


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


def test_run_on_tpu_path_with_a_process_that_dies_says_how(tmp_path, capfd, pretended_tpu):
    # Other ways to die: below, without torch_xla, whose loading takes most of the time here.
    with pytest.raises(spawn.RankError) as caught:
        spawn.run(rank_targets.die_on_last_rank, ("SIGKILL", str(tmp_path)), pretended_tpu, 2, tmp_path / "crash")
    how = "was killed by SIGKILL (probably the machine ran out of memory); the other ranks were ended"
    assert str(caught.value) == f"rank 0 (one process with rank 1) {how}"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "SIGKILL",
            "rank 2 was killed by SIGKILL (probably the machine ran out of memory); the other ranks were ended",
        ),
        ("SIGSEGV", "rank 2 was killed by SIGSEGV; the other ranks were ended"),
        ("exit", "rank 2 ended with exit code 7 and no report; the other ranks were ended"),
        ("SIGTERM", "a rank process of the TPU ended without a report; the other ranks were ended"),
    ],
)
def test_launcher_whose_pool_breaks_names_the_rank_of_the_process_that_died(tmp_path, how, message):
    # About one pool in twenty does not notice the death on CPython 3.11, nor does our watch in it (docs/LOG.md).
    for folder in (tmp_path / name for name in ("first", "second", "third")):
        folder.mkdir()
        launcher = multiprocessing.get_context("spawn").Process(
            target=rank_targets.launch_pool, args=(str(folder), how)
        )
        launcher.start()
        launcher.join(30)
        is_stuck = launcher.exitcode is None
        launcher.kill()
        for path in folder.glob("rank-*.pid"):  # what the parent does to the group
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        if not is_stuck:
            break
    assert launcher.exitcode == 1
    (report,) = read_reports(str(folder))
    assert (report["message"], report["is_consequence"]) == (message, False)


def test_run_on_tpu_path_where_the_launcher_dies_does_not_blame_a_rank(tmp_path, pretended_tpu):
    with pytest.raises(spawn.RankError, match=r"^TPU launcher was killed by SIGKILL"):
        spawn.run(rank_targets.kill_parent, (), pretended_tpu, 2, tmp_path / "crash")


def _wait_for(path):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.1)
    raise TimeoutError(f"{path.name} did not appear")


def _ranks_left():
    """CPU ranks: children of the fork server, whose command line they share."""
    servers = [pid for pid in _descendants(os.getpid()) if "forkserver" in _command(pid)]
    return [pid for server in servers for pid in _descendants(server)]


def _descendants(pid):
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children = [int(line.split()[0]) for line in shown.splitlines() if int(line.split()[1]) == pid]
    return children + [deeper for child in children for deeper in _descendants(child)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""
