"""Makes a plan: adds every graph of a run up by arithmetic, takes it to the TPU's compiler, and turns both into advice.

In: a task. Out: a `Plan`. It runs in a process that can trace (`child.py`).
"""

import collections
import itertools
import operator
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.memory.advice import CoreBatch, Found, largest_batch, same_update
from xla_b2t.memory.chips import CHIPS
from xla_b2t.memory.estimate import MARGIN
from xla_b2t.memory.graphs import Graph, Graphs
from xla_b2t.memory.host_memory import HostPlan, plan_host
from xla_b2t.memory.judge import Judge
from xla_b2t.memory.plan import BatchSize, BucketPlan, Plan, ProgramPlan, Task, Tell
from xla_b2t.memory.subject import subject_by_hand, subject_of
from xla_b2t.models.build import build_without_weights
from xla_b2t.training.shapes import Shapes
from xla_b2t.xla.slices import slice_named


class Planner:
    """Plans one run.

    Args:
        task: what is to be planned.
        tell: told how far it is.
        stack: closes what is opened here.

    Raises:
        UserError: no such slice, no such data, no such model, a batch that does not go into groups and ranks.
    """

    def __init__(self, task: Task, tell: Tell, stack: ExitStack):
        self._task, self._tell = task, tell
        self._config = configuration.loads(task.config, "config")
        goal = slice_named(task.topology)
        self._chip = CHIPS[goal.chip]
        by_hand = task.input_bins, task.num_features, task.num_days
        self._subject = subject_by_hand(*by_hand) if task.input_bins else subject_of(self._config)
        self._configured = plan_batches(self._config, self._subject.group_size, task.num_ranks)
        self._graphs = Graphs(self._config, self._subject, task.num_ranks, goal.kind, stack)
        self._judge = Judge(goal, self._chip, task.num_ranks, Path(task.cache) if task.cache else None, tell, stack)
        self._limit_bytes = int(self._chip.hbm_bytes * (1 - task.margin))
        lengths = [bucket.input_bins for bucket in self._subject.buckets]
        self._longest_first = sorted(range(len(lengths)), key=lambda bucket: -lengths[bucket])

    def plan(self) -> Plan:
        """The whole plan; `seconds` is left to the caller."""
        task, configured = self._task, self._configured
        batch = CoreBatch(configured.batch_size, configured.validation_batch_size, configured.accumulation)
        if task.searches or not task.asks_compiler:
            collections.deque(self._traced(batch), maxlen=0)
        found = self._largest(batch) if task.searches else None
        planned = found.batch if found else batch
        if task.asks_compiler:
            self._ask(planned)
        global_batch = self._trials(planned) if found else configured.global_batch
        shares = self._subject.shares(self._config, configured)
        buckets = tuple(self._bucket(bucket, planned, share, global_batch) for bucket, share in enumerate(shares))
        found = found if task.searches else self._largest(batch)
        times_ms = [bucket.predicted_step_ms for bucket in buckets]
        speed = None if None in times_ms else 1000 * global_batch / sum(map(operator.mul, shares, times_ms))
        trials = self._config.train.steps * configured.global_batch
        return Plan(
            topology=task.topology,
            num_ranks=task.num_ranks,
            hbm_bytes=self._chip.hbm_bytes,
            reserved_bytes=self._chip.reserved_bytes,
            margin=task.margin,
            compiler=f"libtpu {metadata.version('libtpu')}" if task.asks_compiler else "",
            compiled_programs=self._judge.num_compiled,
            batch_size=planned.trials,
            accumulation=planned.accumulation,
            global_batch=global_batch,
            fits=all(bucket.fits for bucket in buckets),
            buckets=buckets,
            recommended=self._recommended(found) if found else None,
            same_global_batch=self._same_global_batch(batch, found),
            updates=self._config.train.steps,
            hours=speed and trials / speed / 3600,
            trials_per_second=speed,
            host=self._host(planned),
        )

    def _host(self, batch: CoreBatch) -> HostPlan:
        subject, config = self._subject, self._config
        shapes = Shapes(subject.sizes, subject.buckets, self._task.num_ranks, batch.trials, batch.validation_trials)
        return plan_host(config, shapes, build_without_weights(config.model, subject.sizes))

    def _graphs_of(self, bucket: int, batch: CoreBatch) -> list[Graph]:
        """The programs of an update, and the one that decodes, where the run validates."""
        graphs = self._graphs.update(bucket, batch.trials, batch.accumulates)
        if not self._config.validation.every:
            return graphs
        return [*graphs, self._graphs.evaluation(bucket, batch.validation_trials, batch.trials, batch.accumulates)]

    def _asked(self, bucket: int, batch: CoreBatch) -> list[Graph]:
        """Those that the compiler is asked about: of the programs that decode, the longest bucket's needs most."""
        graphs = self._graphs_of(bucket, batch)
        is_longest = bucket == self._longest_first[0]
        return [graph for graph in graphs if is_longest or graph.name != "evaluate"]

    def _traced(self, batch: CoreBatch) -> Iterator[list[Graph]]:
        """Of each bucket what the compiler is asked about, the longest first, traced when it is come to."""
        stage, num_buckets = "traced and added up, buckets", len(self._longest_first)
        for done, bucket in enumerate(self._longest_first):
            self._tell(stage, done, num_buckets)
            yield self._asked(bucket, batch)
        self._tell(stage, num_buckets, num_buckets)

    def _ask(self, batch: CoreBatch) -> None:
        num_graphs = len(self._longest_first) * (2 if batch.accumulates else 1) + bool(self._config.validation.every)
        graphs = itertools.chain.from_iterable(self._traced(batch))
        self._judge.ask(graphs, num_graphs, "compiled for the TPU, programs")

    def _asked_bytes(self, bucket: int, batch: CoreBatch) -> int | None:
        """By the compiler."""
        graphs = self._asked(bucket, batch)
        bins = self._subject.buckets[bucket].input_bins
        self._judge.ask(graphs, len(graphs), f"compiled with {batch.trials} trials of {bins:,} bins, programs")
        needed = [self._judge.compiled_bytes(graph) for graph in graphs]
        return None if None in needed else max(needed)

    def _expected_bytes(self, bucket: int, batch: CoreBatch) -> int:
        """By arithmetic, which must not promise too much: with its margin, or from the compiler's figure for the
        configured batch on, where there is one."""
        configured, graphs = self._configured, self._graphs_of(bucket, batch)
        needed_bytes = max(graph.needed_bytes for graph in graphs)
        near = CoreBatch(configured.batch_size, configured.validation_batch_size, configured.accumulation)
        asked = self._asked(bucket, near)
        said = [self._judge.compiled_bytes(graph) for graph in asked]
        if None in said:
            return max(graph.sure_bytes for graph in graphs)
        near_bytes = max(graph.needed_bytes for graph in asked)
        if needed_bytes <= near_bytes:
            return int(needed_bytes * max(said) / near_bytes)
        return int(max(said) + (needed_bytes - near_bytes) * max(1.0, max(said) / near_bytes) * (1 + MARGIN))

    def _largest(self, batch: CoreBatch) -> Found | None:
        needs = self._asked_bytes if self._task.searches else self._expected_bytes
        step = self._subject.group_size
        return largest_batch(batch, step, self._longest_first, self._limit_bytes, needs, self._expected_bytes)

    def _recommended(self, found: Found) -> BatchSize:
        batch = found.batch
        keys = f"--set train.batch_size={batch.trials} --set train.accumulation={batch.accumulation}"
        searches = self._task.searches
        return BatchSize(batch.trials, batch.accumulation, self._trials(batch), searches, found.is_largest, keys)

    def _trials(self, batch: CoreBatch) -> int:
        return batch.trials * batch.accumulation * self._task.num_ranks

    def _same_global_batch(self, batch: CoreBatch, found: Found | None) -> BatchSize | None:
        train = replace(self._config.train, global_batch=self._configured.global_batch, batch_size=0, accumulation=1)
        whole = plan_batches(replace(self._config, train=train), self._subject.group_size, self._task.num_ranks)
        needs = self._asked_bytes if self._task.searches else self._expected_bytes
        # What is no larger than a batch that fits need not be asked about.
        is_known = found is not None and not found.batch.accumulates and whole.batch_size <= found.batch.trials
        plan = whole if is_known else same_update(whole, batch, self._longest_first, self._limit_bytes, needs)
        if plan is None:
            return None
        searches = self._task.searches
        return BatchSize(plan.batch_size, plan.accumulation, plan.global_batch, searches, False, plan.as_keys())

    def _bucket(self, bucket: int, batch: CoreBatch, share: float, global_batch: int) -> BucketPlan:
        programs = tuple(map(self._judge.plan, self._graphs_of(bucket, batch)))
        # A program that was refused without a figure has none to be hidden behind another's.
        refused = any(program.refusal and program.compiled_bytes is None for program in programs)
        compiled = [program.compiled_bytes for program in programs if program.compiled_bytes is not None]
        times_ms = {program.program: program.milliseconds for program in programs if program.program != "evaluate"}
        turns = {name: batch.accumulation if name == "micro" else 1 for name in times_ms}
        step_ms = None if None in times_ms.values() else sum(turns[name] * ms for name, ms in times_ms.items())
        return BucketPlan(
            input_bins=self._subject.buckets[bucket].input_bins,
            share=share,
            estimate_bytes=max(program.estimate_bytes for program in programs),
            compiled_bytes=None if refused else max(compiled, default=None),
            fits=all(program.fits for program in programs),
            predicted_step_ms=step_ms,
            trials_per_second=step_ms and global_batch / step_ms * 1000,
            largest=max(programs, key=ProgramPlan.urgency).largest,
            programs=programs,
        )
