"""Starts the ranks, watches them, and ends them together.

In: a function of the module level and its arguments. Each rank calls it with its `World`. On a CPU a rank is a
process of our own, joined by gloo; on a TPU one child of ours calls torch_xla's `xmp.spawn`, which starts a process
for each chip (on a v3 a rank is a thread of it). The parent never touches a device, so it can always end the rest.

A rank that fails writes a JSON report for the parent into the meeting place, a private folder, then `crash/rank-N.txt`
for people, and exits. The parent takes the first failure, ends the other ranks, and raises it again.
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
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
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
_LAUNCHER = "TPU launcher"
_RANK_PROCESS = "a rank process of the TPU"
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
    processes: dict[str, BaseProcess] = {}
    ended_well = False
    try:
        with _signals_go_to(_interrupt):
            if machine.kind == "tpu":
                name = "rank 0" if num_ranks == 1 else _LAUNCHER  # one rank runs in the process of the launcher
                context = multiprocessing.get_context("spawn")
                rank_args = (target, args, name, meeting_place, str(crash_dir))
                processes[name] = context.Process(target=_tpu_host, args=rank_args)
            else:
                prepare(machine, target.__module__)
                context = multiprocessing.get_context("forkserver")
                for rank in range(num_ranks):
                    rank_args = (target, args, rank, num_ranks, meeting_place, str(crash_dir))
                    processes[f"rank {rank}"] = context.Process(target=_cpu_rank, args=rank_args)
            for process in processes.values():
                process.start()
            _watch(processes, meeting_place, crash_dir)
            ended_well = True
    finally:
        with _signals_go_to(signal.SIG_IGN):  # a second Ctrl-C must not leave a rank behind
            if not ended_well:
                _end(list(processes.values()))
            if sys.exc_info()[0] is Interrupted:
                _end_forkserver()
            shutil.rmtree(meeting_place, ignore_errors=True)


def _watch(processes: dict[str, BaseProcess], meeting_place: str, crash_dir: Path) -> None:
    running = dict(processes)
    failing_since = None
    while running:
        wait([process.sentinel for process in running.values()], timeout=_POLL_S)
        dead = {name: process.exitcode for name, process in running.items() if process.exitcode is not None}
        reports = _read_reports(meeting_place)
        failure = _failure(dead, reports, crash_dir)
        if failure is not None:
            raise failure
        if reports:  # of ranks that lost another one, or still write: what happened shows in a moment
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > _GRACE_S:
                raise _as_error(reports[0], crash_dir)
            time.sleep(_POLL_S)
            continue
        for name in dead:
            del running[name]


def _read_reports(meeting_place: str) -> list[dict[str, Any]]:
    """What ranks have written about their end: causes before consequences, the earliest first."""
    reports = [json.loads(path.read_text()) for path in Path(meeting_place).glob("*.json")]
    return sorted(reports, key=lambda report: (report["is_consequence"], report["time"]))


def _failure(dead: dict[str, int], reports: list[dict[str, Any]], crash_dir: Path) -> Exception | None:
    """The first thing that went wrong and is not the consequence of another, if it shows by now."""
    reported = {report["name"] for report in reports}
    for name, code in dead.items():
        if code != 0 and name not in reported:
            return RankError(_how_ended(name, code))
    # One that still lives is writing its crash file: ended now, it would leave none.
    if reports and not reports[0]["is_consequence"] and (reports[0]["name"] in dead or _LAUNCHER in dead):
        return _as_error(reports[0], crash_dir)
    return None


def _how_ended(name: str, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no report"
    why = " (probably the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"{name} {how}{why}; the other ranks were ended"


def _as_error(report: dict[str, Any], crash_dir: Path) -> Exception:
    if report["user_error"] is not None:
        return UserError(*report["user_error"])
    path = _path(crash_dir, report["name"], ".txt")
    return RankError(report["message"] + (f"\n  its traceback: {path}" if path.exists() else ""))


def _end(processes: list[BaseProcess]) -> None:
    """Ends every rank with all that it started: asks first, then does not ask."""
    started = [process for process in processes if process.pid is not None]
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for process in started:
            if number == signal.SIGKILL or process.is_alive():
                _signal_group(process, number)
        until = time.monotonic() + patience
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


def _interrupt(number: int, _frame: object) -> None:
    raise Interrupted(number)


# Below runs in the ranks.


def _cpu_rank(target: Target, args: tuple, rank: int, num_ranks: int, meeting_place: str, crash_dir: str) -> None:
    _settle()
    with _reporting(f"rank {rank}", meeting_place, crash_dir):
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


def _tpu_host(target: Target, args: tuple, name: str, meeting_place: str, crash_dir: str) -> None:
    _settle()
    with _reporting(name, meeting_place, crash_dir):
        import torch_xla.distributed.xla_multiprocessing as xmp

        with _naming_the_dead(meeting_place):
            xmp.spawn(_tpu_rank, (target, args, meeting_place, crash_dir), None if name == _LAUNCHER else 1)


def _tpu_rank(ordinal: int, target: Target, args: tuple, meeting_place: str, crash_dir: str) -> None:
    _settle(own_group=False)
    with _reporting(f"rank {ordinal}", meeting_place, crash_dir):
        Path(meeting_place, f"rank-{ordinal}.pid").write_text(str(os.getpid()))
        from torch_xla import runtime

        from xla_b2t.xla.world import Alone, Graph

        target(Graph() if runtime.world_size() > 1 else Alone("tpu"), *args)


@contextmanager
def _naming_the_dead(meeting_place: str) -> Iterator[None]:
    """Watches the processes of the pool inside: it says only that one died, and of the last one not even that."""
    children: dict[int, BaseProcess] = {}  # a process that has ended keeps its exit code here, whoever reaped it

    def watch() -> None:
        while True:
            children.update({child.pid: child for child in multiprocessing.active_children()})
            codes = {pid: child.exitcode for pid, child in children.items()}
            if any(codes.values()):
                _report_the_dead(codes, meeting_place)
            time.sleep(_POLL_S)

    threading.Thread(target=watch, daemon=True, name="watch-children").start()
    try:
        yield
    except BrokenProcessPool:
        time.sleep(2 * _POLL_S)  # the watch knows more
        _report_the_dead({}, meeting_place)


def _report_the_dead(codes: dict[int, int | None], meeting_place: str) -> None:
    try:
        reports = _read_reports(meeting_place)
        reported = {report["pid"] for report in reports}
        # The pool ends the rest by SIGTERM, so that says nothing.
        silent = [pid for pid, code in codes.items() if code not in (None, 0, -signal.SIGTERM) and pid not in reported]
        message = f"{_RANK_PROCESS} ended without a report; the other ranks were ended"
        if silent:
            message = _how_ended(_ranks_of(silent[0], meeting_place), codes[silent[0]])
        _send_report(meeting_place, _LAUNCHER, message, bool(reports and not silent), None)
    finally:
        os._exit(1)


def _ranks_of(pid: int, meeting_place: str) -> str:
    """The name of a rank process: its first rank, and those that are other threads of it."""
    paths = Path(meeting_place).glob("rank-*.pid")
    ranks = [f"rank {rank}" for rank in sorted(int(path.stem[5:]) for path in paths if path.read_text() == str(pid))]
    if len(ranks) > 1:
        return f"{ranks[0]} (one process with {', '.join(ranks[1:])})"
    return ranks[0] if ranks else _RANK_PROCESS  # it died before it was a rank


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
def _reporting(name: str, meeting_place: str, crash_dir: str) -> Iterator[None]:
    """Writes down what went wrong before the process ends, and ends it at once: others may be waiting for it."""
    try:
        yield
    except BaseException as error:
        try:
            _write_report(name, meeting_place, Path(crash_dir), error)
        finally:
            os._exit(1)


def _write_report(name: str, meeting_place: str, crash_dir: Path, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    is_consequence = "gloo/transport" in str(error)  # another rank has left
    user_error = list(error.args) if isinstance(error, UserError) else None
    # The parent's report first: it must not be lost where the run directory takes no file, or stderr is closed.
    _send_report(meeting_place, name, f"{name} failed: {type(error).__name__}: {error}", is_consequence, user_error)
    with suppress(OSError):
        crash_dir.mkdir(parents=True, exist_ok=True)
    _write(_path(crash_dir, name, ".txt"), f"{name}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    with suppress(OSError):
        if is_consequence:
            sys.stderr.write(f"{name}: lost the connection to another rank\n")
        elif user_error is None:
            sys.stderr.write(f"{name}:\n{text}")
        sys.stderr.flush()


def _send_report(meeting_place: str, name: str, message: str, is_consequence: bool, user_error: list | None) -> None:
    report = {"name": name, "pid": os.getpid(), "time": time.time(), "message": message}
    report |= {"is_consequence": is_consequence, "user_error": user_error}
    _write(_path(meeting_place, name, ".json"), json.dumps(report))


def _write(path: Path, text: str) -> None:
    """Writes the whole file, or says that it cannot: an error is on its way already."""
    try:
        path.with_suffix(".part").write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(path.with_suffix(".part"), path)
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"{path} could not be written: {error.strerror}\n")


def _path(folder: str | Path, name: str, suffix: str) -> Path:
    return Path(folder, name.replace(" ", "-") + suffix)


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
