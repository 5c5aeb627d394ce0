"""What a rank does around its target, in its own process: it settles in, and it reports how it ends.

In: the target and its arguments, from `spawn`. Out: the target's own effects, or a JSON report in the meeting place for
the parent and `crash/rank-N.txt` for people. Who starts ranks, and what becomes of the others, is left to `spawn`.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from xla_b2t.errors import UserError
from xla_b2t.xla.stop_order import StopOrder, ask_on_sigterm

Target = Callable[..., None]
"""Called as target(world, *args) in every rank; must be importable, as it crosses to another process."""

_CROWDED_FLAGS = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
"""For more ranks than the CPU has cores, each of which compiles for itself: compiles take a third of the time, steps up
to half as long again (docs/LOG.md has the figures)."""
LAUNCHER = "TPU launcher"
RANK_PROCESS = "a rank process of the TPU"
POLL_S = 0.2


def run_on_cpu(target: Target, args: tuple, rank: int, num_ranks: int, meeting_place: str, crash_dir: str) -> None:
    """One CPU rank, joined with the others by gloo."""
    _settle(meeting_place)
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
            target(Alone("cpu", meeting_place), *args)
            return
        # A file, and not a port, is where the ranks meet: nothing to be free, nothing to race for.
        with _silent_stdout():
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting_place}/ranks", rank=rank, world_size=num_ranks
            )
        target(Gloo(meeting_place), *args)
        # A rank that leaves early would look like a failure to one that still reduces. After an error nothing is
        # closed: the others would notice, and report, before this rank has said what happened.
        dist.barrier()
        dist.destroy_process_group()


def run_tpu_host(target: Target, args: tuple, name: str, meeting_place: str, crash_dir: str) -> None:
    """The child that starts every rank of a TPU host through torch_xla; `name` is `LAUNCHER`, or the one rank's."""
    _settle(meeting_place)
    with _reporting(name, meeting_place, crash_dir):
        import torch_xla.distributed.xla_multiprocessing as xmp

        with _naming_the_dead(meeting_place):
            xmp.spawn(_tpu_rank, (target, args, meeting_place, crash_dir), None if name == LAUNCHER else 1)


def _tpu_rank(ordinal: int, target: Target, args: tuple, meeting_place: str, crash_dir: str) -> None:
    _settle(meeting_place, own_group=False)
    with _reporting(f"rank {ordinal}", meeting_place, crash_dir):
        Path(meeting_place, f"rank-{ordinal}.pid").write_text(str(os.getpid()))
        from torch_xla import runtime

        from xla_b2t.xla.world import Alone, Graph

        target(Graph(meeting_place) if runtime.world_size() > 1 else Alone("tpu", meeting_place), *args)


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
            time.sleep(POLL_S)

    threading.Thread(target=watch, daemon=True, name="watch-children").start()
    try:
        yield
    except BrokenProcessPool:
        time.sleep(2 * POLL_S)  # the watch knows more
        _report_the_dead({}, meeting_place)


def _report_the_dead(codes: dict[int, int | None], meeting_place: str) -> None:
    try:
        reports = read_reports(meeting_place)
        reported = {report["pid"] for report in reports}
        # The pool ends the rest by SIGTERM, so that says nothing.
        silent = [pid for pid, code in codes.items() if code not in (None, 0, -signal.SIGTERM) and pid not in reported]
        message = f"{RANK_PROCESS} ended without a report; the other ranks were ended"
        if silent:
            message = how_ended(_ranks_of(silent[0], meeting_place), codes[silent[0]])
        _send_report(meeting_place, LAUNCHER, message, bool(reports and not silent), None)
    finally:
        os._exit(1)


def _ranks_of(pid: int, meeting_place: str) -> str:
    """The name of a rank process: its first rank, and those that are other threads of it."""
    paths = Path(meeting_place).glob("rank-*.pid")
    ranks = [f"rank {rank}" for rank in sorted(int(path.stem[5:]) for path in paths if path.read_text() == str(pid))]
    if len(ranks) > 1:
        return f"{ranks[0]} (one process with {', '.join(ranks[1:])})"
    return ranks[0] if ranks else RANK_PROCESS  # it died before it was a rank


def _settle(meeting_place: str, own_group: bool = True) -> None:
    """Leaves Ctrl-C to the parent, tells all ranks of a SIGTERM, and follows the parent when it dies."""
    if own_group:
        os.setsid()
    os.dup2(2, 1)  # stdout carries the result of the command, which is the parent's to print
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ask_on_sigterm(StopOrder(meeting_place), is_in_pool=not own_group)
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
    _write(report_path(crash_dir, name, ".txt"), f"{name}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    with suppress(OSError):
        if is_consequence:
            sys.stderr.write(f"{name}: lost the connection to another rank\n")
        elif user_error is None:
            sys.stderr.write(f"{name}:\n{text}")
        sys.stderr.flush()


def _send_report(meeting_place: str, name: str, message: str, is_consequence: bool, user_error: list | None) -> None:
    report = {"name": name, "pid": os.getpid(), "time": time.time(), "message": message}
    report |= {"is_consequence": is_consequence, "user_error": user_error}
    _write(report_path(meeting_place, name, ".json"), json.dumps(report))


def _write(path: Path, text: str) -> None:
    """Writes the whole file, or says that it cannot: an error is on its way already."""
    try:
        path.with_suffix(".part").write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(path.with_suffix(".part"), path)
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(f"{path} could not be written: {error.strerror}\n")


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


def read_reports(meeting_place: str) -> list[dict[str, Any]]:
    """What ranks have written about their end: causes before consequences, the earliest first."""
    reports = [json.loads(path.read_text()) for path in Path(meeting_place).glob("*.json")]
    return sorted(reports, key=lambda report: (report["is_consequence"], report["time"]))


def how_ended(name: str, code: int) -> str:
    """In words, how a process that left no report ended, from its exit code (negative: a signal)."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no report"
    why = " (probably the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"{name} {how}{why}; the other ranks were ended"


def report_path(folder: str | Path, name: str, suffix: str) -> Path:
    """Where the report of a rank, or of the launcher, lies."""
    return Path(folder, name.replace(" ", "-") + suffix)
