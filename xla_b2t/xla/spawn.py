"""Starts the ranks, watches them, and ends them together.

In: a function of the module level and its arguments. Each rank calls it with its `World`. On a CPU a rank is a
process of our own, joined by gloo; on a TPU one child of ours calls torch_xla's `xmp.spawn`, which starts a process
for each chip (on a v3 a rank is a thread of it). The parent never touches a device, so it can always end the rest.

A rank that fails writes `crash/rank-N.txt` (for people) and `.json` (for the parent) before anything else, and exits.
The parent takes the first failure, ends the other ranks, and raises it again.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from xla_b2t.errors import UserError
from xla_b2t.xla.machine import Machine

Target = Callable[..., None]
"""Called as target(world, *args) in every rank; must be importable, as it crosses to another process."""

_CROWDED_FLAGS = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
"""For more ranks than the CPU has cores, each of which compiles for itself: compiles take a third of the time, steps up
to half as long again (docs/LOG.md has the figures)."""
_POLL_S = 0.2
_GRACE_S = 2.0


class RankError(Exception):
    """A rank ended by a fault that is ours, or was killed. Its traceback is in the crash file."""


class Interrupted(Exception):
    """The user or the machine asked the run to end; `args[0]` is the signal's number."""


def prepare(machine: Machine, module: str) -> None:
    """Starts to load torch and the module of the target in the background, so that CPU ranks are up sooner.

    Optional; call it early. A second call changes nothing.
    """
    if machine.kind == "cpu":
        # Loading torch_xla does not start its runtime, so forking afterwards is safe.
        forkserver.set_forkserver_preload(["torch", "torch_xla", module])
        forkserver.ensure_running()


def run(target: Target, args: tuple[Any, ...], machine: Machine, num_ranks: int, crash_dir: str | Path) -> None:
    """Runs target(world, *args) on every rank and returns when all have returned.

    Raises:
        UserError: the first failure, where a rank found something that the user can mend.
        RankError: the first failure otherwise, or how a rank was killed.
        Interrupted: SIGINT or SIGTERM reached this process; every rank is gone.
    """
    crash_dir = Path(crash_dir)
    shutil.rmtree(crash_dir, ignore_errors=True)
    meeting_place = tempfile.mkdtemp(prefix="xla_b2t-")
    processes: list[BaseProcess] = []
    ended_well = False
    try:
        with _signals_as_exception():
            if machine.kind == "tpu":
                context = multiprocessing.get_context("spawn")
                processes = [context.Process(target=_tpu_host, args=(target, args, num_ranks, str(crash_dir)))]
            else:
                prepare(machine, target.__module__)
                context = multiprocessing.get_context("forkserver")
                processes = [
                    context.Process(
                        target=_cpu_rank, args=(target, args, rank, num_ranks, meeting_place, str(crash_dir))
                    )
                    for rank in range(num_ranks)
                ]
            for process in processes:
                process.start()
            _watch(processes, crash_dir)
            ended_well = True
    finally:
        with _signals_ignored():
            if not ended_well:
                _end(processes)
            shutil.rmtree(meeting_place, ignore_errors=True)


def _watch(processes: list[BaseProcess], crash_dir: Path) -> None:
    running = dict(enumerate(processes))
    failing_since = None
    while running:
        wait([process.sentinel for process in running.values()], timeout=_POLL_S)
        dead = {rank: process.exitcode for rank, process in running.items() if process.exitcode is not None}
        reports = _read_reports(crash_dir)
        failure = _failure(dead, reports, crash_dir)
        if failure is not None:
            raise failure
        if reports:  # of ranks that lost another one: what happened to that one shows in a moment
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > _GRACE_S:
                raise _as_error(reports[0], crash_dir)
            time.sleep(_POLL_S)
            continue
        for rank in dead:
            del running[rank]


def _read_reports(crash_dir: Path) -> list[dict[str, Any]]:
    """What ranks have written about their end, the earliest first."""
    reports = [json.loads(path.read_text()) for path in crash_dir.glob("rank-*.json")]
    return sorted(reports, key=lambda report: report["time"])


def _failure(dead: dict[int, int], reports: list[dict[str, Any]], crash_dir: Path) -> Exception | None:
    """The first thing that went wrong and is not the consequence of another, if it shows by now.

    Args:
        dead: exit code of each process that has ended.
        reports: as `_read_reports` gives them.
        crash_dir: where the tracebacks are.
    """
    causes = [report for report in reports if not report["is_consequence"]]
    reported = {report["rank"] for report in reports}
    for rank, code in dead.items():
        if code < 0:
            return RankError(_how_killed(rank, -code))
        if code > 0 and rank not in reported:
            return RankError(f"rank {rank} ended with exit code {code} and no report; the other ranks were ended")
    return _as_error(causes[0], crash_dir) if causes else None


def _how_killed(rank: int, number: int) -> str:
    why = " (probably the machine ran out of memory)" if number == signal.SIGKILL else ""
    return f"rank {rank} was killed by {signal.Signals(number).name}{why}; the other ranks were ended"


def _as_error(report: dict[str, Any], crash_dir: Path) -> Exception:
    if report["user_error"] is not None:
        return UserError(*report["user_error"])
    traceback_path = crash_dir / f"rank-{report['rank']}.txt"
    return RankError(f"rank {report['rank']} failed: {report['error']}\n  its traceback: {traceback_path}")


def _end(processes: list[BaseProcess]) -> None:
    """Ends every rank with all that it started: asks first, then does not ask."""
    started = [process for process in processes if process.pid is not None]
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for process in started:
            if number == signal.SIGKILL or process.is_alive():
                _signal_group(process.pid, number)
        until = time.monotonic() + patience
        for process in started:
            process.join(max(0.0, until - time.monotonic()))


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # gone, or not yet the leader of a group
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


@contextmanager
def _signals_as_exception() -> Iterator[None]:
    """SIGINT and SIGTERM become `Interrupted`, in the main thread; elsewhere signals are not ours to change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(number)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """While ranks are ended a second Ctrl-C must not leave one behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# Below runs in the ranks.


def _cpu_rank(target: Target, args: tuple, rank: int, num_ranks: int, meeting_place: str, crash_dir: str) -> None:
    _settle()
    with _reporting(rank, crash_dir):
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", GLOO_SOCKET_IFNAME=_loopback())
        os.environ.setdefault("XLA_RNG_BIT_GENERATOR", "three_fry")
        if num_ranks > (os.cpu_count() or 1):
            os.environ["XLA_FLAGS"] = f"{_CROWDED_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
        import torch
        import torch.distributed as dist

        from xla_b2t.xla.world import Alone, Gloo

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        if num_ranks == 1:
            target(Alone("cpu"), *args)
            return
        # A file, and not a port, is where the ranks meet: nothing to be free, nothing to race for.
        with _silent_stdout():
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting_place}/ranks", rank=rank, world_size=num_ranks
            )
        target(Gloo(), *args)
        # A rank that leaves early would look like a failure to one that still reduces. After an error nothing is
        # closed: the others would notice, and report, before this rank has said what happened.
        dist.barrier()
        dist.destroy_process_group()


def _tpu_host(target: Target, args: tuple, num_ranks: int, crash_dir: str) -> None:
    _settle()
    import torch_xla.distributed.xla_multiprocessing as xmp

    xmp.spawn(_tpu_rank, args=(target, args, crash_dir), nprocs=1 if num_ranks == 1 else None)


def _tpu_rank(ordinal: int, target: Target, args: tuple, crash_dir: str) -> None:
    _settle(own_group=False)
    with _reporting(ordinal, crash_dir):
        from torch_xla import runtime

        from xla_b2t.xla.world import Alone, Graph

        target(Graph() if runtime.world_size() > 1 else Alone("tpu"), *args)


def _settle(own_group: bool = True) -> None:
    """Leaves the terminal's signals to the parent, and follows the parent when it dies."""
    if own_group:
        os.setsid()
    os.dup2(2, 1)  # stdout carries the result of the command, which is the parent's to print
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow_parent, daemon=True, name="follow-parent").start()


def _follow_parent() -> None:
    # Not getppid: the parent of a process of the forkserver is the forkserver, which lives as long as a rank does.
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by another process"
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _reporting(rank: int, crash_dir: str) -> Iterator[None]:
    """Writes down what went wrong before the process ends, and ends it at once: others may be waiting for it."""
    try:
        yield
    except BaseException as error:
        _write_report(rank, Path(crash_dir), error)
        sys.stderr.flush()
        os._exit(1)


def _write_report(rank: int, crash_dir: Path, error: BaseException) -> None:
    now = time.time()
    text = "".join(traceback.format_exception(error))
    is_consequence = "gloo/transport" in str(error)  # another rank has left
    if is_consequence:
        sys.stderr.write(f"rank {rank}: lost the connection to another rank\n")
    elif not isinstance(error, UserError):
        sys.stderr.write(f"rank {rank}:\n{text}")
    crash_dir.mkdir(parents=True, exist_ok=True)
    (crash_dir / f"rank-{rank}.txt").write_text(f"rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    report = {
        "rank": rank,
        "time": now,
        "error": f"{type(error).__name__}: {error}",
        "is_consequence": is_consequence,
        "user_error": list(error.args) if isinstance(error, UserError) else None,
    }
    (crash_dir / f".rank-{rank}").write_text(json.dumps(report))
    os.replace(crash_dir / f".rank-{rank}", crash_dir / f"rank-{rank}.json")


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """gloo greets on stdout, from C++, once for every rank."""
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _loopback() -> str:
    """The name of the loopback interface: gloo must not look for a route on a machine that has none."""
    names = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else []
    return "lo" if "lo" in names or not names else names[0]
