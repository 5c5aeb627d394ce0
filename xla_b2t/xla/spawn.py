"""Starts the ranks, watches them, and ends them together.

In: a function of the module level and its arguments. Each rank calls it with its `World`. On a CPU a rank is a
process of our own, joined by gloo; on a TPU one child of ours calls torch_xla's `xmp.spawn`, which starts a process
for each chip (on a v3 a rank is a thread of it). The parent never touches a device, so it can always end the rest.

A rank that fails writes a JSON report for the parent into the meeting place, a private folder, then `crash/rank-N.txt`
for people, and exits. The parent takes the first failure, ends the other ranks, and raises it again.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from xla_b2t.errors import UserError
from xla_b2t.xla.machine import Machine
from xla_b2t.xla.rank import LAUNCHER, POLL_S, Target, how_ended, read_reports, report_path, run_on_cpu, run_tpu_host
from xla_b2t.xla.stop_order import StopOrder

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
        with _signals_go_to(signal.SIG_IGN):  # the server inherits it: Ctrl-C while it loads is not its to report
            forkserver.ensure_running()


def run(
    target: Target,
    args: tuple[Any, ...],
    machine: Machine,
    num_ranks: int,
    crash_dir: str | Path,
    patience_s: float = 0,
) -> int | None:
    """Runs target(world, *args) on every rank and returns when all have returned.

    Args:
        target, args: see `rank.Target`.
        machine: that it runs on.
        num_ranks: at least 1.
        crash_dir: for the tracebacks of ranks.
        patience_s: for a target that heeds `World.stop_order`: time to end by itself when it is asked to. A second
            signal ends it at once.

    Returns:
        The signal by which the ranks were asked to end, if they were.

    Raises:
        UserError: the first failure, where a rank found something that the user can mend.
        RankError: the first failure otherwise, or how a rank was killed.
        Interrupted: SIGINT or SIGTERM reached this process, and the ranks did not end in time; every rank is gone.
    """
    crash_dir = Path(crash_dir)
    shutil.rmtree(crash_dir, ignore_errors=True)
    meeting_place = tempfile.mkdtemp(prefix="xla_b2t-")
    processes: dict[str, BaseProcess] = {}
    ended_well = False
    order = StopOrder(meeting_place)

    def asked(number: int, _frame: object) -> None:
        if not patience_s or order.asked() is not None:
            raise Interrupted(number)
        order.ask(number)

    try:
        with _signals_go_to(asked):
            if machine.kind == "tpu":
                name = "rank 0" if num_ranks == 1 else LAUNCHER  # one rank runs in the process of the launcher
                context = multiprocessing.get_context("spawn")
                rank_args = (target, args, name, meeting_place, str(crash_dir))
                processes[name] = context.Process(target=run_tpu_host, args=rank_args)
            else:
                prepare(machine, target.__module__)
                context = multiprocessing.get_context("forkserver")
                for rank in range(num_ranks):
                    rank_args = (target, args, rank, num_ranks, meeting_place, str(crash_dir))
                    processes[f"rank {rank}"] = context.Process(target=run_on_cpu, args=rank_args)
            for process in processes.values():
                process.start()
            _watch(processes, meeting_place, crash_dir, order, patience_s)
            ended_well = True
            return order.asked()
    finally:
        with _signals_go_to(signal.SIG_IGN):  # a second Ctrl-C must not leave a rank behind
            if not ended_well:
                _end(list(processes.values()))
            if sys.exc_info()[0] is Interrupted:
                _end_forkserver()
            shutil.rmtree(meeting_place, ignore_errors=True)


def _watch(
    processes: dict[str, BaseProcess], meeting_place: str, crash_dir: Path, order: StopOrder, patience_s: float
) -> None:
    running = dict(processes)
    failing_since = asked_since = None
    while running:
        if number := order.asked():
            asked_since = asked_since or time.monotonic()
            if time.monotonic() - asked_since > patience_s:
                raise Interrupted(number)
        wait([process.sentinel for process in running.values()], timeout=POLL_S)
        dead = {name: process.exitcode for name, process in running.items() if process.exitcode is not None}
        reports = read_reports(meeting_place)
        failure = _failure(dead, reports, crash_dir)
        if failure is not None:
            raise failure
        if reports:  # of ranks that lost another one, or still write: what happened shows in a moment
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > _GRACE_S:
                raise _as_error(reports[0], crash_dir)
            time.sleep(POLL_S)
            continue
        for name in dead:
            del running[name]


def _failure(dead: dict[str, int], reports: list[dict[str, Any]], crash_dir: Path) -> Exception | None:
    """The first thing that went wrong and is not the consequence of another, if it shows by now."""
    reported = {report["name"] for report in reports}
    for name, code in dead.items():
        if code != 0 and name not in reported:
            return RankError(how_ended(name, code))
    # One that still lives is writing its crash file: ended now, it would leave none.
    if reports and not reports[0]["is_consequence"] and (reports[0]["name"] in dead or LAUNCHER in dead):
        return _as_error(reports[0], crash_dir)
    return None


def _as_error(report: dict[str, Any], crash_dir: Path) -> Exception:
    if report["user_error"] is not None:
        return UserError(*report["user_error"])
    path = report_path(crash_dir, report["name"], ".txt")
    return RankError(report["message"] + (f"\n  its traceback: {path}" if path.exists() else ""))


def _end(processes: list[BaseProcess]) -> None:
    """Ends every rank with all that it started. There is nothing to ask them for: SIGTERM only asks for a good end."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        _signal_group(process, signal.SIGKILL)
    until = time.monotonic() + _GRACE_S
    for process in started:
        process.join(max(0.0, until - time.monotonic()))


def _signal_group(process: BaseProcess, number: int) -> None:
    """Never raises: there is an error to report, and there are other ranks to end."""
    try:
        os.killpg(process.pid, number)
    except OSError:  # gone, or not yet the leader of a group
        if process.is_alive():  # else its number may be another process's by now
            with suppress(OSError):
                os.kill(process.pid, number)


def _end_forkserver() -> None:
    """It notices that we are gone only when it has loaded torch. There is no public way to end it."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _signals_go_to(handler: Any) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler`, in the main thread; elsewhere signals are not ours to change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
