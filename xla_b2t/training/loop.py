"""A training run, seen from one rank: updates in the order of the schedule, validation, checkpoints, a summary.

In: a `Job`. Out: the run directory, written by rank 0. Every decision (validate, save, stop) follows from the step
number or from a value that was reduced over all ranks first, so that no rank ever decides alone.
"""

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_b2t import config as configuration
from xla_b2t.config import Config
from xla_b2t.data.batch_plan import batches_ahead, longest_batch_bytes, plan_batches
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import Batch
from xla_b2t.data.schedule import Schedule, Update, deal
from xla_b2t.data.selection import open_selected
from xla_b2t.evaluation.decode import DecodingFallback, SplitDecoder
from xla_b2t.models.build import build_model
from xla_b2t.models.policy import DTYPES
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training import skipping
from xla_b2t.training.agreement import check_same_schedule, check_same_weights
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder, load_file
from xla_b2t.training.clock import RunClock
from xla_b2t.training.events import EventLog
from xla_b2t.training.fallback import explaining, fall_back, memory_keys, way_out, way_out_of_decoding
from xla_b2t.training.kernel_check import check_kernels
from xla_b2t.training.memory_log import MemoryLog
from xla_b2t.training.progress import Progress
from xla_b2t.training.step import TrainStep, initial_state
from xla_b2t.training.summary import Course, write_summary
from xla_b2t.training.totals import Totals
from xla_b2t.training.validation import Validation, validate
from xla_b2t.training.weights import start_from
from xla_b2t.xla.attempt import OutOfHbm
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import device
from xla_b2t.xla.feed import DeviceBatch, Feed
from xla_b2t.xla.world import World


@dataclass(frozen=True)
class Job:
    """What a rank is to do.

    Attributes:
        config: the run's configuration.
        checkpoint: file to go on from; "" begins anew.
        allow_recompile: count compiles after warm-up and host fallbacks instead of stopping.
        seconds: what the parent has taken already, by phase.
        started: when the ranks were started, in seconds since the epoch.
        init_from: file whose weights a new run begins with; "" draws them from the seed.
        planned_bytes: HBM that a core is expected to need at its peak; None where nobody planned.
    """

    config: Config
    checkpoint: str
    allow_recompile: bool
    seconds: dict[str, float]
    started: float
    init_from: str = ""
    planned_bytes: int | None = None


def run_rank(world: World, job: Job) -> None:
    """Trains on one rank from beginning to end.

    Raises:
        UserError: whatever the user can mend: data, configuration, a step that compiled again, a full disk, a memory
            that is too small.
    """
    run: _Run | None = None
    with (
        ExitStack() as stack,
        explaining(
            lambda: way_out(run.plan if run else None), lambda: f"step {run.step_number + 1}" if run else "starting"
        ),
    ):
        run = _Run(world, job, stack)
        run.train()


class _Run:
    """A run on one rank. Files and displays that it opens are closed by the stack."""

    def __init__(self, world: World, job: Job, stack: ExitStack):
        config = job.config
        self.world, self.config, self.planned_bytes = world, config, job.planned_bytes
        self.group_set = open_selected(config.data)
        self.configured = self.plan = plan_batches(config, self.group_set.group_size, world.size)
        self.schedule = Schedule(
            config.data.recipe,
            self.group_set.splits["train"],
            config.run.seed,
            self.plan.groups_per_update,
            config.data.days_per_batch,
        )
        resumed = load_file(job.checkpoint) if job.checkpoint else None
        self.resumed_from = resumed.step if resumed else None
        self.step_number = self.saved_step = resumed.step if resumed else 0
        self.course = Course(**resumed.course) if resumed else Course()
        self.course.keep_limits(memory_keys(config))
        if self.course.largest_batch:
            self.plan = self.plan.at_most(self.course.largest_batch)
        self.folder = CheckpointFolder(config.run.dir)

        self.guard = CompileGuard(job.allow_recompile)
        sizes = sizes_of(self.group_set)
        model = build_model(config.model, sizes, seed=config.run.seed)
        if job.init_from and not resumed:
            start_from(model, job.init_from, self.group_set.sessions, config.data.dir)
        self.kernels = check_kernels(model, DTYPES[config.model.dtype], self.plan.batch_size, trains=True)
        state = resumed.state if resumed else initial_state(model)
        check_same_weights(state.weights, world)
        check_same_schedule(self.schedule, world)
        self.step = TrainStep(
            model,
            sizes.num_classes,
            config,
            world,
            self.guard,
            state,
            accumulation=self.plan.accumulation,
            way_out=lambda: way_out(self.plan),
        )
        self.decoder = SplitDecoder(
            model,
            sizes.num_classes,
            config,
            world,
            self.guard,
            self.plan.groups_per_validation_slot,
            most_trials=self.course.largest_validation_batch,
            on_fallback=self._decode_less,
        )
        self.train_reader = stack.enter_context(GroupReader(self.group_set, "train"))
        validates = config.validation.every > 0
        self.val_reader = GroupReader(self.group_set, config.validation.split) if validates else None
        if self.val_reader:
            stack.enter_context(self.val_reader)
        self.events = stack.enter_context(EventLog(config.run.dir, self.step_number)) if world.rank == 0 else None
        self.progress = stack.enter_context(Progress()) if world.rank == 0 else None
        self.clock = RunClock(job.seconds, lambda: self.guard.compile_seconds)
        self.clock.add("start", time.time() - job.started)
        self.memory_log = MemoryLog(self.progress, self.events, has_kernels=world.kind == "tpu")

    def train(self) -> None:
        """Runs every update that is left, and leaves a summary of the whole."""
        if self.progress:
            self.progress.start(self.config.train.steps, self.step_number, self.course.best_val_per)
            self.progress.message(self.plan.in_words())
            self.memory_log.limits(self.course)
            self.memory_log.kernels(self.kernels)
        while refused := self._run_steps():
            self._fall_back(refused)
        if self.world.rank == 0:
            self._write_summary("completed" if self.step_number == self.config.train.steps else "interrupted")

    def _run_steps(self) -> OutOfHbm | None:
        """Updates in batches of the present size, to the end, None, or until one is refused for want of memory."""
        train, validation = self.config.train, self.config.validation
        steps = range(self.step_number, train.steps)
        num_batches = len(steps) * self.plan.accumulation
        data = self.group_set
        longest_bytes = longest_batch_bytes(self.plan.batch_size, data.buckets, data.num_features)
        ahead = batches_ahead(self.config.data.prefetch_mb, longest_bytes)
        with Feed(self._read(steps), num_batches, device(), ahead) as feed:
            batches = iter(feed)
            for step in steps:
                next_meeting = self.world.next_meeting(step, train.log_every)
                if self.world.stop_order.ends_before(step, self.world.rank, next_meeting):
                    self._end_early()
                    break
                try:
                    with self.clock.phase("train"):
                        self._update(self.schedule.update(step), batches)
                except OutOfHbm as refused:
                    return refused.with_traceback(None)  # its frames hold tensors of the core
                done = self.step_number == train.steps
                validates = self.val_reader is not None and (done or self.step_number % validation.every == 0)
                if train.agreement_every and self.step_number % train.agreement_every == 0:
                    with self.clock.phase("train"):
                        check_same_weights(self.step.parameters(), self.world)
                saves = validates or done or self.step_number % train.checkpoint_every == 0
                # Before a checkpoint too, so that weights whose loss is not finite are never the latest.
                if saves or self.step_number % train.log_every == 0:
                    with self.clock.phase("train"):
                        self._log()
                result = self._validate(may_end=not done) if validates else None
                is_best = result is not None and self.course.validated(result.per, result.per_by_day)
                if saves:
                    self._save(is_best, result.per if result else None)
        return None

    def _end_early(self) -> None:
        """On all ranks alike, with a checkpoint of what was done."""
        if self.progress:
            number = self.world.stop_order.asked() or signal.SIGTERM
            self.progress.message(f"asked to end by {signal.Signals(number).name}, after step {self.step_number:,}")
        if self.step_number == self.saved_step:
            return
        if self.step_number % self.config.train.log_every:
            with self.clock.phase("train"):
                self._log()
        self._save(is_best=False, val_per=None)

    def _fall_back(self, refused: OutOfHbm) -> None:
        """Goes on in smaller micro-steps, on all ranks alike: what they decide from is the same."""
        gc.collect()  # what a refused step left behind would be a part of the next graph
        bins = self.group_set.buckets[self.schedule.update(self.step_number).bucket].input_bins
        fallback = fall_back(self.plan, refused, self.step_number, bins, self.configured)
        self.plan = fallback.after
        self.course.largest_batch = self.plan.batch_size
        self.guard.forget("train", "apply")
        self.step.accumulate(self.plan.accumulation)
        dtype = DTYPES[self.config.model.dtype]
        kernels = check_kernels(self.step.model, dtype, self.plan.batch_size, trains=True)
        self.memory_log.fell_back(self.step_number, fallback)
        self.memory_log.kernels(kernels)

    def _decode_less(self, fallback: DecodingFallback) -> None:
        self.course.largest_validation_batch = fallback.after
        check_kernels(self.step.model, DTYPES[self.config.model.dtype], fallback.after, trains=False)
        self.memory_log.fell_back(self.step_number, fallback)

    def _read(self, steps: range) -> Iterator[Batch]:
        for step in steps:
            update = self.schedule.update(step)
            dealt = deal(update.groups, self.plan.groups_per_update, self.world.size, self.plan.slots_per_update)
            for groups in dealt[self.world.rank]:
                yield from self.plan.cut(self.train_reader.read(groups, update.bucket))

    def _update(self, update: Update, batches: Iterator[DeviceBatch]) -> None:
        if self.progress:
            self.progress.phase("train" if self.guard.knows("train", update.bucket) else "compile")
        began, compiles = time.monotonic(), self.guard.compiles
        self.step.run(self.step_number, update.bucket, batches)
        self.step_number += 1
        if self.guard.compiles == compiles:
            trials = int(self.schedule.index.num_valid_G[list(update.groups)].sum())
            self.clock.step(time.monotonic() - began, trials)
        if self.progress:
            self.progress.update(self.step_number, None, self.clock.trials_per_second)

    def _log(self) -> None:
        began = time.monotonic()
        totals = self.step.totals()
        self.clock.wait(time.monotonic() - began)
        told = skipping.in_words(totals, self.course.skipped_updates)
        self.course.skipped_updates += int(totals.skipped)
        if self.progress and told:
            self.progress.message(f"step {self.step_number:,}   {told}")
        if totals.skipped_in_a_row >= self.config.train.most_skipped_in_a_row:
            self._give_up(totals)
        if not totals.updates:
            return  # all were skipped
        self.course.log(totals.mean_loss)
        if self.events and self.progress:
            self.progress.update(self.step_number, totals.mean_loss, self.clock.trials_per_second)
            self.events.write(
                "train",
                self.step_number,
                loss=totals.mean_loss,
                objective=totals.mean_objective,
                gradient_norm=totals.mean_norm,
                trials_per_second=self.clock.trials_per_second,
                step_ms=self.clock.step_ms_median,
                epoch=self.schedule.epochs(self.step_number),
                skipped=int(totals.skipped),
            )
            # It was planned for the configured batch.
            is_planned = self.plan == self.configured and not self.course.largest_validation_batch
            self.memory_log.in_use(self.step_number, self.planned_bytes if is_planned else None)

    def _give_up(self, totals: Totals) -> None:
        """Ends the run on all ranks alike."""
        file = Path(self.config.run.dir) / "crash" / skipping.FILE_NAME
        if self.world.rank == 0:
            steps = skipping.skipped_steps(totals, self.step_number)
            last = steps[-self.config.train.most_skipped_in_a_row :]
            file = skipping.save_trials(self.config.run.dir, last, self.schedule, self.train_reader)
        self.world.votes(0)  # the first error ends the others: not before the file is there
        raise skipping.too_many(totals, self.step_number, str(file), self.folder.exists())

    def _validate(self, may_end: bool) -> Validation | None:
        """Decodes the held-out split; None, on all ranks alike, where the run was asked to end meanwhile."""
        assert self.val_reader is not None, "there is a split to validate on"
        if self.progress:
            self.progress.phase("validate")

        def helps() -> str:
            option, size = "--resume --set validation.batch_size=", self.group_set.group_size
            return way_out_of_decoding(option, self.decoder.batch_size, size)

        with self.clock.phase("validate"), explaining(helps, lambda: f"validation after step {self.step_number}"):
            result = validate(self.decoder, self.val_reader, self.world, may_end)
        if result and self.events and self.progress:
            self.progress.validated(self.step_number, result.per)
            self.events.write("val", self.step_number, per=result.per, loss=result.loss, per_day=result.per_by_day)
        return result

    def _save(self, is_best: bool, val_per: float | None) -> None:
        if self.progress:
            self.progress.phase("save")
        self.saved_step = self.step_number
        with self.clock.phase("checkpoint"):
            state = self.step.state()
            if state is None or self.events is None:
                return  # rank 0 writes; if it cannot, its error ends all ranks
            checkpoint = Checkpoint(
                step=self.step_number,
                state=state,
                config=configuration.dumps(self.config),
                conversion=self.group_set.conversion,
                global_batch=self.plan.global_batch,
                sessions=self.group_set.sessions,
                num_features=self.group_set.num_features,
                num_classes=self.group_set.num_classes,
                val_per=val_per,
                course=asdict(self.course),
            )
            path = self.folder.save(checkpoint, is_best)
        self.events.write("checkpoint", self.step_number, file=path.name, best=is_best)
        self._write_summary("running")

    def _write_summary(self, status: str) -> None:
        summary = {
            "status": status,
            "steps": self.step_number,
            "cores": self.world.size,
            "world": self.world.kind,
            "global_batch": self.plan.global_batch,
            "batch_size": self.plan.batch_size,
            "accumulation": self.plan.accumulation,
            **self.course.result(),
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
