"""A training run, seen from one rank: updates in the order of the schedule, validation, checkpoints, a summary.

In: a `Job`. Out: the run directory, written by rank 0. Every decision (validate, save, stop) follows from the step
number or from a value that was reduced over all ranks first, so that no rank ever decides alone.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xla_b2t import config as configuration
from xla_b2t.config import Config
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.data.groups import Batch, GroupReader, open_group_set
from xla_b2t.data.schedule import Schedule, deal
from xla_b2t.errors import UserError
from xla_b2t.evaluation.decode import SplitDecoder
from xla_b2t.evaluation.per import score
from xla_b2t.files import replacing
from xla_b2t.models.build import build_model
from xla_b2t.models.dtypes import DTYPES
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.agreement import check_same_weights
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder, load_file
from xla_b2t.training.clock import RunClock
from xla_b2t.training.events import EventLog
from xla_b2t.training.progress import Progress
from xla_b2t.training.step import Totals, TrainStep
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import device
from xla_b2t.xla.feed import Feed
from xla_b2t.xla.world import World


@dataclass(frozen=True)
class Job:
    """What a rank is to do.

    Attributes:
        config: the run's configuration.
        resume: go on from the latest checkpoint of `run.dir`.
        allow_recompile: count compiles after warm-up and host fallbacks instead of stopping.
        seconds: what the parent has taken already, by phase.
        started: when the ranks were started, in seconds since the epoch.
    """

    config: Config
    resume: bool
    allow_recompile: bool
    seconds: dict[str, float]
    started: float


@dataclass(frozen=True)
class Validation:
    """One decoding of the held-out split, over all ranks."""

    per: float
    per_by_day: dict[str, float]
    loss: float


def run_rank(world: World, job: Job) -> None:
    """Trains on one rank from beginning to end.

    Raises:
        UserError: whatever the user can mend: data, configuration, a step that compiled again, a full disk.
    """
    with ExitStack() as stack:
        run = _Run(world, job, stack)
        run.train()


@dataclass
class Course:
    """How the run has gone so far: what the summary tells, and what a resumed run goes on from."""

    val_per: float | None = None
    best_val_per: float | None = None
    val_per_by_day: dict[str, float] = field(default_factory=dict)
    train_loss_first: float | None = None
    train_loss_last: float | None = None


class _Run:
    def __init__(self, world: World, job: Job, stack: ExitStack):
        self.world = world
        self.job = job
        self.config = job.config
        self.group_set = open_group_set(self.config.data.dir)
        self.plan = plan_batches(self.config, self.group_set.group_size, world.size)
        self.schedule = Schedule(
            self.config.data.recipe,
            self.group_set.splits["train"],
            self.config.run.seed,
            self.plan.groups_per_update,
            self.config.data.days_per_batch,
        )
        self.folder = CheckpointFolder(self.config.run.dir)
        resumed = load_file(self.folder.find("latest")) if job.resume else None
        if resumed:
            self._refuse_other_data(resumed)
        self.resumed_from = resumed.step if resumed else None
        self.step_number = resumed.step if resumed else 0
        self.course = Course(**resumed.course) if resumed else Course()

        self.guard = CompileGuard(job.allow_recompile)
        sizes = Sizes(self.group_set.num_features, len(self.group_set.sessions), self.group_set.num_classes)
        torch.manual_seed(self.config.run.seed)
        model = build_model(self.config.model, sizes)
        self.step = TrainStep(model, self.config, world, self.guard, resumed.state if resumed else None)
        check_same_weights(self.step.weights(), world)

        self.clock = RunClock(job.seconds)
        validation = self.config.validation
        self.val_reader = None
        if validation.split in self.group_set.splits and validation.every:
            self.val_reader = stack.enter_context(GroupReader(self.group_set, validation.split))
        batch_size = validation.batch_size or self.plan.batch_size
        self.decoder = SplitDecoder(
            model,
            DTYPES[self.config.model.dtype],
            self.config.augment.smooth_sigma_bins,
            world,
            self.guard,
            max(1, batch_size // self.group_set.group_size),
            self.config.data.prefetch_batches,
        )
        self.events = stack.enter_context(EventLog(self.config.run.dir, self.step_number)) if self.is_first else None
        self.progress = stack.enter_context(Progress()) if self.is_first else None
        self.clock.add("start", time.time() - job.started)

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def _refuse_other_data(self, checkpoint: Checkpoint) -> None:
        found = (self.group_set.num_features, self.group_set.sessions)
        if found != (checkpoint.num_features, checkpoint.sessions):
            raise UserError(
                f"the groups have {found[0]} features and {len(found[1])} sessions, the checkpoint was trained on "
                f"{checkpoint.num_features} and {len(checkpoint.sessions)}, or on sessions of other names",
                self.config.data.dir,
                "give the groups that the run began with: --set data.dir=",
            )

    def train(self) -> None:
        train, validation = self.config.train, self.config.validation
        if self.progress:
            self.progress.start(train.steps, self.step_number)
        reader = GroupReader(self.group_set, "train")
        num_batches = (train.steps - self.step_number) * train.accumulation
        began = time.monotonic()
        steps = range(self.step_number, train.steps)
        feed = Feed(self._host_batches(reader, steps), num_batches, device(), self.config.data.prefetch_batches)
        with reader, feed:
            batches = iter(feed)
            while self.step_number < train.steps:
                self._update(batches)
                done = self.step_number == train.steps
                validates = self.val_reader is not None and (self.step_number % validation.every == 0 or done)
                saves = validates or self.step_number % train.checkpoint_every == 0 or done
                # Before a checkpoint too, so that weights whose loss is not finite are never the latest.
                if saves or self.step_number % train.log_every == 0:
                    self._log(self.step.totals())
                is_best = self._validate() if validates else False
                if saves:
                    self._save(is_best, self.course.val_per if validates else None)
        other = sum(self.clock.seconds.get(name, 0.0) for name in ("validate", "checkpoint"))
        compiled = self.guard.compile_seconds
        self.clock.add("compile", compiled)
        self.clock.add("train", max(0.0, time.monotonic() - began - other - compiled))
        if self.is_first:
            self._write_summary("completed")

    def _host_batches(self, reader: GroupReader, steps: range) -> Iterator[Batch]:
        for step in steps:
            update = self.schedule.update(step)
            dealt = deal(update.groups, self.plan.groups_per_update, self.world.size, self.plan.accumulation)
            for groups in dealt[self.world.rank]:
                yield reader.read(groups, update.bucket)

    def _update(self, batches: Iterator[Any]) -> None:
        update = self.schedule.update(self.step_number)
        new = not self.guard.knows("train", update.bucket)
        if self.progress:
            self.progress.phase("compile" if new else "train")
        began, compiled = time.monotonic(), self.guard.compiles
        self.step.run(self.step_number, update.bucket, batches)
        self.step_number += 1
        if self.guard.compiles == compiled:
            trials = int(self.schedule.index.num_valid_G[list(update.groups)].sum())
            self.clock.step(time.monotonic() - began, trials)
        if self.progress:
            self.progress.update(self.step_number, None, self.clock.trials_per_second)

    def _log(self, totals: Totals) -> None:
        if not math.isfinite(totals.mean_loss):
            raise UserError(
                f"the loss is {totals.mean_loss} in the {self.config.train.log_every} updates up to {self.step_number}",
                f"{self.config.run.dir}/events.jsonl",
                "go on from the last checkpoint with --resume, or begin anew with a lower optimizer.rate.peak",
            )
        if self.course.train_loss_first is None:
            self.course.train_loss_first = totals.mean_loss
        self.course.train_loss_last = totals.mean_loss
        if self.events and self.progress:
            self.progress.update(self.step_number, totals.mean_loss, self.clock.trials_per_second)
            self.events.write(
                "train",
                self.step_number,
                loss=totals.mean_loss,
                gradient_norm=totals.mean_norm,
                trials_per_second=self.clock.trials_per_second,
                step_ms=self.clock.step_ms_median,
                epoch=self.step_number / self.schedule.updates_per_epoch,
            )

    def _validate(self) -> bool:
        """Decodes the held-out split; True, on all ranks alike, when it is the best so far."""
        if self.progress:
            self.progress.phase("validate")
        compiled = self.guard.compile_seconds
        with self.clock.phase("validate"):
            result = self._decode()
        self.clock.add("validate", compiled - self.guard.compile_seconds)
        course = self.course
        course.val_per, course.val_per_by_day = result.per, result.per_by_day
        is_best = course.best_val_per is None or result.per < course.best_val_per
        course.best_val_per = result.per if is_best else course.best_val_per
        if self.events and self.progress:
            self.progress.validated(self.step_number, result.per)
            self.events.write("val", self.step_number, per=result.per, loss=result.loss, per_day=result.per_by_day)
        return is_best

    def _decode(self) -> Validation:
        sessions = self.group_set.sessions
        sums = np.zeros(2 * len(sessions) + 2)
        for prediction in self.decoder.decode(self.val_reader):
            day = sessions.index(prediction.session)
            result = score([(prediction.session, prediction.reference, prediction.decoded)])[prediction.session]
            sums[2 * day : 2 * day + 2] += result.errors, result.phonemes
            sums[-2:] += prediction.loss, 1
        # Rates are taken after the reduction, so that every rank, and every number of ranks, finds the same.
        *_, loss, trials = sums = self.world.sum(sums)
        errors_D, phonemes_D = sums[:-2:2], sums[1:-2:2]
        per_by_day = {
            session: float(errors / phonemes)
            for session, errors, phonemes in zip(sessions, errors_D, phonemes_D, strict=True)
            if phonemes
        }
        return Validation(float(errors_D.sum() / max(1, phonemes_D.sum())), per_by_day, float(loss / max(1, trials)))

    def _save(self, is_best: bool, val_per: float | None) -> None:
        if not self.is_first:
            return
        self.progress.phase("save")
        with self.clock.phase("checkpoint"):
            self._write_summary("running")
            path = self.folder.save(
                Checkpoint(
                    step=self.step_number,
                    state=self.step.state(),
                    config=configuration.dumps(self.config),
                    sessions=self.group_set.sessions,
                    num_features=self.group_set.num_features,
                    num_classes=self.group_set.num_classes,
                    val_per=val_per,
                    course=asdict(self.course),
                ),
                is_best,
            )
        self.events.write("checkpoint", self.step_number, file=path.name, best=is_best)

    def _write_summary(self, status: str) -> None:
        summary = {
            "status": status,
            "steps": self.step_number,
            "cores": self.world.size,
            "world": self.world.kind,
            "global_batch": self.plan.global_batch,
            **asdict(self.course),
            "trials_per_second": self.clock.trials_per_second,
            "step_ms_median": self.clock.step_ms_median,
            "compiles": self.guard.compiles,
            "compiles_after_warmup": self.guard.compiles_after_warmup,
            "host_fallbacks": self.guard.host_fallbacks,
            "padding_efficiency": self.group_set.padding_efficiency("train"),
            "seconds": {name: round(seconds, 2) for name, seconds in self.clock.seconds.items()},
            "resumed_from": self.resumed_from,
        }
        write_summary(self.config.run.dir, summary)


def write_summary(run_dir: str | Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json` whole: a reader never sees half of it."""
    with replacing(Path(run_dir) / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=1))
