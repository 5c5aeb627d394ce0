"""`xla_b2t train`: the main job. Checks what can be checked, starts the ranks, and tells how it ended."""

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xla_b2t.commands.run_options import NamedRun, add_run_options, named_run
from xla_b2t.errors import UserError
from xla_b2t.files import replacing
from xla_b2t.training.restarts import count_restart, forget_restarts

if TYPE_CHECKING:
    from xla_b2t.audit.resume import Resumed
    from xla_b2t.config import Config

SUMMARY = "train a decoder on the cores of this machine"
EXAMPLE = "python -m xla_b2t.launch --cores 8 --config configs/gru_baseline.toml --set data.dir=groups"

PATIENCE_S = 25.0
"""For ranks that are asked to end: they finish an update and save. Machines are taken after 30 s."""
EXIT_PREEMPTED = 75
"""sysexits.h calls it EX_TEMPFAIL: try again. What starts a run anew asks for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_run_options(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        choices=("latest", "auto"),
        help="go on from the latest checkpoint of run.dir; `auto` starts anew when there is none",
    )
    parser.add_argument("--overwrite", action="store_true", help="remove the run that run.dir holds")
    parser.add_argument(
        "--no-preflight",
        action="store_true",
        help="start without proof of dtypes, host reads and graphs: what is wrong then shows on the cores, if at all",
    )
    parser.add_argument(
        "--allow-recompile", action="store_true", help="go on after a recompile or a host fallback; both are counted"
    )


def run(args: argparse.Namespace) -> int:
    """Trains; prints the result as a table, or `summary.json` with --json."""
    started = time.time()
    named = named_run(args)
    config, run_dir = named.config, Path(named.config.run.dir)

    from xla_b2t import config as configuration
    from xla_b2t.xla import spawn
    from xla_b2t.xla.machine import find_machine

    machine = find_machine()
    num_ranks = machine.ranks(config.run.cores)
    spawn.prepare(machine, "xla_b2t.training.loop")
    may_clear = args.overwrite or named.has_demo_dir
    checkpoint = _to_resume(run_dir, config.train.steps, args.resume, args.overwrite, may_clear)
    if args.resume == "auto":
        done = _done(run_dir)
        if restarts := count_restart(run_dir, done, config.run.most_restarts):
            print(f"restart {restarts} of this run, from step {done:,}", file=sys.stderr)
    else:
        forget_restarts(run_dir)
    named.make_demo_data()

    preflight_began = time.time()
    resumed = _resumed(run_dir, checkpoint) if checkpoint else None
    try:
        planned_bytes = _prove(named, num_ranks, resumed, args.no_preflight)
    except SystemExit:  # what SIGTERM makes of a process that waits for another
        return _tell_interrupted(run_dir, signal.SIGTERM)
    core_bytes = planned_bytes or 0 if machine.kind == "cpu" else 0
    print(f"preflight: {_host_memory(config, num_ranks, core_bytes)}", file=sys.stderr)
    init_from = _to_begin_with(config, run_dir) if config.train.init_from and not checkpoint else ""
    seconds = {"start": preflight_began - started, "preflight": time.time() - preflight_began}
    from xla_b2t.models.build import with_all_options

    config = with_all_options(config)
    _prepare_run_dir(run_dir, configuration.dumps(config), bool(checkpoint))

    from xla_b2t.training.loop import Job, run_rank

    job = Job(config, checkpoint, args.allow_recompile, seconds, time.time(), init_from, planned_bytes)
    try:
        asked = spawn.run(run_rank, (job,), machine, num_ranks, run_dir / "crash", PATIENCE_S)
    except spawn.Interrupted as interrupted:
        _mark(run_dir, "interrupted")
        return _tell_interrupted(run_dir, interrupted.args[0])
    except spawn.RankError as error:
        _mark(run_dir, "failed")
        print(f"error: {error}", file=sys.stderr)
        return 1
    except UserError:
        _mark(run_dir, "failed")
        raise
    from xla_b2t.training.summary import read_summary

    summary = read_summary(run_dir)
    if asked and (not summary or summary["status"] != "completed"):
        return _tell_interrupted(run_dir, asked)
    if args.json:
        print(json.dumps(summary))
    else:
        from xla_b2t.commands.tables import print_summary

        print_summary(summary, run_dir)
    return 0


def _prove(named: NamedRun, num_ranks: int, resumed: "Resumed | None", numbers_only: bool) -> int | None:
    """The preflight; raises everything that must change before the run can start. Gives the HBM that a core needs."""
    if numbers_only:
        from xla_b2t.audit.inventory import check

        print(
            "warning: --no-preflight: no dtype, host read or graph of this run is proven. What is wrong with them will "
            "show on the cores, as lost hours or not at all.",
            file=sys.stderr,
        )
        check(named.config, num_ranks, resumed, named.given)
        return None
    from xla_b2t.audit.findings import refuse
    from xla_b2t.audit.preflight import preflight
    from xla_b2t.commands.progress import waiting
    from xla_b2t.commands.tables import summary_of

    with waiting("preflight: every dtype, shape and number"):
        report = preflight(named.config, num_ranks, resumed, named.given)
    refuse(report.findings)
    for line in (*report.exceptions, summary_of(report)):
        print(f"preflight: {line}", file=sys.stderr)
    return report.planned_bytes or None


def _host_memory(config: "Config", num_ranks: int, core_bytes: int) -> str:
    """Plans the host memory of the ranks; errors as of `check_host`."""
    from xla_b2t.data.selection import open_selected
    from xla_b2t.memory.host_memory import check_host, find_available, plan_host
    from xla_b2t.models.build import build_without_weights
    from xla_b2t.training.shapes import run_shapes

    shapes = run_shapes(config, open_selected(config.data), num_ranks)
    model = build_without_weights(config.model, shapes.sizes)
    return check_host(plan_host(config, shapes, model, core_bytes), find_available())


def _to_resume(run_dir: Path, steps: int, resume: str | None, overwrite: bool, may_clear: bool) -> str:
    """The checkpoint file to go on from, "" for none; an earlier run is never lost by accident."""
    from xla_b2t.training.checkpoint import CheckpointFolder

    folder = CheckpointFolder(run_dir)
    holds_run = folder.exists()
    if overwrite and resume:
        raise UserError("--overwrite and --resume contradict each other", "the command line", "give one of them")
    if resume:
        if not holds_run and resume == "latest":
            fix = "leave --resume away, or give --resume auto"
            raise UserError("there is no checkpoint to resume from", str(run_dir), fix)
        if not holds_run:
            return ""
        checkpoint, done = folder.find("latest")
        if done >= steps:
            fix = "raise train.steps to go on further"
            raise UserError(f"the run has {done:,} updates already, train.steps is {steps:,}", str(run_dir), fix)
        return str(checkpoint)
    if holds_run and not may_clear:
        fix = "add --resume to go on, --overwrite to lose it, or --set run.dir=ELSEWHERE"
        raise UserError("this directory holds a run", str(run_dir), fix)
    if not may_clear:
        _refuse_foreign(run_dir)
    return ""


def _to_begin_with(config: "Config", run_dir: Path) -> str:
    """The file of `train.init_from`, which is known to fit the data and the model."""
    from xla_b2t.training.weights import weights_file

    path = weights_file(config.train.init_from)
    if path.resolve().is_relative_to(run_dir.resolve()):
        fix = "give this run another directory: --set run.dir="
        raise UserError(
            "a run cannot begin with weights that lie in its own directory", f"train.init_from: {path}", fix
        )
    return str(path)


def _resumed(run_dir: Path, checkpoint: str) -> "Resumed":
    from xla_b2t.audit.resume import Resumed
    from xla_b2t.training.checkpoint import CheckpointFolder

    return Resumed(str(run_dir / "config.toml"), *CheckpointFolder(run_dir).trained_on(), checkpoint)


def _refuse_foreign(run_dir: Path) -> None:
    """What lies here under our names and is not ours is nobody's to remove. A run that failed early may be replaced."""
    from xla_b2t import config as configuration

    names = [name for name in ("checkpoints", "summary.json", "events.jsonl", "crash") if (run_dir / name).exists()]
    try:
        is_ours = (run_dir / "config.toml").exists() and bool(configuration.load(run_dir / "config.toml"))
    except UserError:
        is_ours = False
    is_early = is_ours and not any((run_dir / "checkpoints").glob("*"))
    if (names or (run_dir / "config.toml").exists()) and not is_early:
        found = ", ".join(names) or "config.toml"
        fix = "give a directory of its own with --set run.dir=, or --overwrite to lose what is there"
        raise UserError(f"this directory holds {found}, and no run to go on with", str(run_dir), fix)


def _prepare_run_dir(run_dir: Path, config: str, is_resumed: bool) -> None:
    try:
        if not is_resumed:
            _clear(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        with replacing(run_dir / "config.toml") as path:
            path.write_text(config)
    except OSError as error:
        raise UserError(
            f"the run directory cannot be written: {error.strerror}", str(run_dir), "give another one: --set run.dir="
        ) from None


def _clear(run_dir: Path) -> None:
    """Removes what an earlier run wrote, and nothing else: the folder may be somebody's."""
    for pattern in ("checkpoints", "crash", "config.toml", "summary.json", "events.jsonl", "events.out.tfevents.*"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _mark(run_dir: Path, status: str) -> None:
    """Puts how the run ended into the summary of the last checkpoint, where there is one."""
    from xla_b2t.training.summary import read_summary, write_summary

    summary = read_summary(run_dir)
    if summary:
        try:
            write_summary(run_dir, {**summary, "status": status})
        except UserError as error:  # a full disk, say; what ended the run is told after this, and matters more
            print(f"warning: {error.what} ({error.where})", file=sys.stderr)


def _tell_interrupted(run_dir: Path, number: int) -> int:
    from xla_b2t.training.checkpoint import CheckpointFolder

    folder = CheckpointFolder(run_dir)
    saved = "no checkpoint was written yet"
    if folder.exists():
        saved = f"the last checkpoint is of step {folder.latest_step()}; go on with --resume"
    print(f"interrupted by {signal.Signals(number).name}, all ranks are gone; {saved}", file=sys.stderr)
    return EXIT_PREEMPTED if number == signal.SIGTERM else 128 + number


def _done(run_dir: Path) -> int:
    from xla_b2t.training.checkpoint import CheckpointFolder

    folder = CheckpointFolder(run_dir)
    return folder.latest_step() if folder.exists() else 0
