"""Rehearses a run: every graph that its core will be given, traced on placeholders, watched, and compared.

In: a model without weights and the shapes of the run. Out: what was found, and how much was looked at. Training and
evaluation of every bucket are watched operation by operation, the smallest first, and their programs are looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import nn

from xla_b2t.audit import lowered
from xla_b2t.audit.construction import Construction, construct
from xla_b2t.audit.findings import Collected, Finding
from xla_b2t.audit.lines import is_trainers, line_of_function, line_of_traceback
from xla_b2t.audit.promotions import Promotions
from xla_b2t.audit.step_rules import StepRules
from xla_b2t.audit.stored import inputs, optimizer_state
from xla_b2t.audit.watch import LARGEST_STEP, TooLarge, Watch
from xla_b2t.config import Config
from xla_b2t.data.groups import Bucket
from xla_b2t.errors import DtypeError, UserError
from xla_b2t.memory.graphs import graph_of, waiting_bytes
from xla_b2t.models.policy import DTYPES, kept_exception
from xla_b2t.training.shapes import Shapes
from xla_b2t.training.traced import TracedRun, blank_batch, traced_run
from xla_b2t.xla.device import to_device
from xla_b2t.xla.feed import DeviceBatch
from xla_b2t.xla.trace import as_rank, computed, handles, hlo_text, placeholders

_LONGEST_MESSAGE = 300
Note = Callable[[str, list[Finding] | None], None]


@dataclass(frozen=True)
class Rehearsed:
    """Findings in the order of the step, counts of what was looked at, and HBM that training needs by arithmetic."""

    findings: list[Finding]
    checked: dict[str, int]
    planned_bytes: int = 0


def rehearse(made: Construction, config: Config, shapes: Shapes, note: Note = lambda line, findings: None) -> Rehearsed:
    """Traces all graphs of a run.

    Args:
        made: the model; it is left on placeholders.
        config: of the run.
        shapes: of the run.
        note: told the line of every operation before it is traced, and the findings when there is a new one, in case
            the process dies of it.
    """
    with traced_run(made.model, shapes.sizes.num_classes, config, shapes.num_ranks) as run:
        found = _Rehearsal(made, config, shapes, run, note).all()
    found.findings.extend(_steps_rule(made.model, config, shapes) if not found.findings else ())
    return found


class _Rehearsal:
    """The graphs of one run, one after the other."""

    def __init__(self, made: Construction, config: Config, shapes: Shapes, run: TracedRun, note: Note):
        self._made, self._config, self._shapes, self._run = made, config, shapes, run
        self._collected = Collected()
        narrow = DTYPES[config.model.dtype]
        self._promotions = Promotions(narrow, self._collected)
        self._rules = StepRules(narrow, self._collected, shapes.sizes.num_days, self._promotions)
        self._watch = Watch(made.model, self._promotions, self._rules, self._collected)
        self._watch.note = note
        self._seen: set[str] = set()
        self._is_news = True
        self._has_failed = False

    def all(self) -> Rehearsed:
        run, shapes = self._run, self._shapes
        buckets = sorted(shapes.buckets, key=lambda bucket: bucket.input_bins)
        stored = optimizer_state(run.step.slots, run.step.sums, self._made.model)
        graphs: list[Finding] = []
        planned_bytes = 0
        for bucket in buckets:
            programs = self._updates(bucket)
            for kind, program in (*programs.items(), ("evaluate", self._evaluation(bucket))):
                graphs += self._look(kind, bucket, program) if program else []
            planned_bytes = self._planned_bytes(programs, bucket) if bucket is buckets[-1] else 0
        # Without the watch nothing is made up for a step to go on with: reading a value would end the process.
        if not self._watch.went_on and not self._has_failed and "host-random" not in self._collected.kinds():
            graphs = self._same_again(buckets[0]) + graphs
        batch = self._blank(buckets[0], shapes.trials)
        collected = self._collected.list()
        # A program has what the operations were blamed for already.
        told = {finding.kind for finding in collected}
        graphs = [finding for finding in graphs if finding.kind not in told]
        checked = {
            "optimizer_tensors": 3 * len(run.step.slots) + len(run.step.sums),
            "inputs": len(buckets) * (len(batch) + 1),
            "operations": self._collected.now,
            "graphs": len(self._seen),
        }
        findings = [*stored, *inputs(batch, run.controls_N, "feed"), *collected, *graphs]
        return Rehearsed(findings, checked, planned_bytes)

    def _planned_bytes(self, programs: dict[str, bytes], bucket: Bucket) -> int:
        """HBM that training needs in this bucket, by arithmetic; 0 where that does not understand an operation. It is
        for people: no run may end by it."""
        waiting = waiting_bytes(self._blank(bucket, self._shapes.trials), self._config)
        try:
            graphs = [graph_of(self._run, name, program, waiting) for name, program in programs.items()]
        except (KeyError, ValueError, IndexError):
            return 0
        return max((graph.needed_bytes for graph in graphs), default=0)

    def _blank(self, bucket: Bucket, trials: int) -> DeviceBatch:
        return blank_batch(trials, bucket.input_bins, self._shapes.sizes.num_features, bucket.label_slots)

    def _same_again(self, bucket: Bucket) -> list[Finding]:
        """The second update, and the last rank, must be given the graph that the first was. Seen on a model made anew,
        which no step has touched."""
        sizes, num_ranks = self._shapes.sizes, self._shapes.num_ranks
        model = construct(self._config.model, sizes).model
        fresh = TracedRun(model, sizes.num_classes, self._config, num_ranks)
        self._is_news = not self._collected.list()  # else it may fail for what the watch helped the step past
        first = self._updates(bucket, run=fresh)
        forward = line_of_function(model.forward)
        with as_rank(num_ranks - 1, num_ranks):
            both = self._updates(bucket, number=1, run=fresh)
        for kind, program in first.items() if both else ():
            graph = f"{kind} graph of {bucket.input_bins} bins"
            if lowered.are_equal(hlo_text(program), hlo_text(both[kind])):
                continue
            third = self._updates(bucket, number=2, run=fresh).get(kind, b"")
            is_by_rank = bool(third) and lowered.are_equal(hlo_text(program), hlo_text(third))
            what = "on the last rank" if is_by_rank else "at the second update"
            return [lowered.another(hlo_text(program), hlo_text(both[kind]), graph, what, forward)]
        return []

    def _look(self, kind: str, bucket: Bucket, program: bytes) -> list[Finding]:
        graph = f"{kind} graph of {bucket.input_bins} bins"
        self._seen.add(graph if kind != "apply" else kind)
        text = hlo_text(program)
        return [*lowered.forbidden(text, graph), *lowered.too_large(text, graph)]

    def _updates(self, bucket: Bucket, number: int = 0, run: TracedRun | None = None) -> dict[str, bytes]:
        """The programs of an update; watched, but on another run than the one that is rehearsed."""
        batch = self._blank(bucket, self._shapes.trials)
        if run:
            return self._attempt(lambda: run.update(batch, number)) or {}
        return self._attempt(lambda: self._run.update(batch, number, self._watching())) or {}

    def _evaluation(self, bucket: Bucket) -> bytes:
        batch = self._blank(bucket, self._shapes.validation_trials)
        return self._attempt(lambda: self._run.evaluation(batch, self._watching())) or b""

    @contextmanager
    def _watching(self) -> Iterator[None]:
        model, batch = self._made.model, self._run.batch
        named = dict([*model.named_parameters(), *model.named_buffers()])
        kept = {name: tensor for name, tensor in named.items() if kept_exception(name, self._config.model)}
        self._promotions.begin(kept, self._run.scheduled)
        self._rules.begin(batch.days_B)
        with self._watch.watching():
            yield

    def _attempt(self, trace: Callable[[], dict[str, bytes] | bytes]) -> dict[str, bytes] | bytes | None:
        """What a trace gives; None when it raises, with a finding where what was found does not explain it."""
        self._watch.failed_at = ""
        try:
            return trace()
        except (Exception, SystemExit) as error:  # whatever a user's model raises
            self._has_failed = True
            for finding in self._reasons(error) if self._is_news else ():
                self._collected.add(*astuple(finding))
        return None

    def _reasons(self, error: BaseException) -> Iterator[Finding]:
        model, slots = self._made.model, self._run.step.slots
        forward = line_of_function(model.forward)
        lost = [slot.name for slot in slots if slot.parameter.grad is None]
        line = self._watch.failed_at or line_of_traceback(error.__traceback__)
        line = forward if is_trainers(line) else line
        if isinstance(error, TooLarge):
            fix = "let xla_b2t.xla.scan.scan run the loop over time: its graph is the same at every length"
            found = f"more than {LARGEST_STEP:,} operations in one step, most of them of this line"
            yield Finding("size", "step", error.line, found, f"at most {LARGEST_STEP:,}", fix)
        elif isinstance(error, DtypeError):
            yield Finding("carry", "recurrence", line, str(error), "one dtype", f"bring it there: .to(x.dtype), {line}")
        elif isinstance(error, UserError) and 0 < len(lost) < len(slots):
            # What was replaced or left out by a made-up value says nothing of its own.
            is_explained = self._watch.went_on or not self._collected.kinds().isdisjoint(("optimizer", "host-random"))
            for name in lost if not is_explained else ():
                found, fix = (
                    "no gradient: the loss does not depend on it",
                    "use it in forward, or set requires_grad=False",
                )
                yield Finding("unused", name, self._made.line_of(name) or f"model: {name}", found, "a gradient", fix)
        elif self._watch.went_on or (self._collected.list() and not isinstance(error, UserError)):
            return  # with a made-up value, or in another dtype than meant, a failure says nothing new
        elif isinstance(error, UserError):
            found, _, expected = error.what.partition(", expected ")
            yield Finding("protocol", type(model).__name__, forward, found, expected, error.fix)
        else:
            words = " ".join(str(error).split())[:_LONGEST_MESSAGE]
            kind = "host-read" if "to numpy" in words else "error"
            found = f"{type(error).__name__}: {words}"
            yield Finding(kind, "step", line, found, "a step that can be traced", f"correct the line {line}")


def _steps_rule(model: nn.Module, config: Config, shapes: Shapes) -> Sequence[Finding]:
    """Whether `steps_B` of forward follow `output_steps`, for every number of bins of the smallest bucket."""
    bins = min(bucket.input_bins for bucket in shapes.buckets)
    counts = np.arange(bins + 1, dtype=np.int32)
    blank = blank_batch(bins + 1, bins, shapes.sizes.num_features, 1)
    (features_BTC,) = placeholders([blank.features_BTC.to(DTYPES[config.model.dtype])])
    input_bins_B, days_B = to_device([torch.from_numpy(counts), torch.zeros(bins + 1, dtype=torch.int32)])
    for tensor in (*model.parameters(), *model.buffers()):
        (tensor.data,) = placeholders([tensor])
    unknown = handles([features_BTC, *model.parameters(), *model.buffers()])
    model.eval()
    with torch.no_grad():
        steps_B = model(features_BTC, input_bins_B, days_B).steps_B
    found_B = computed(steps_B, unknown)
    if found_B is None:
        return []
    for count, steps in zip(counts.tolist(), found_B.tolist(), strict=True):
        promised = max(1, model.output_steps(count))
        if steps != promised:
            line = line_of_function(model.forward)
            found = f"steps_B is {steps} for a trial of {count} bins, output_steps({count}) is {promised}"
            fix = "make output_steps and forward follow one rule, at every length"
            return [Finding("protocol", type(model).__name__, line, found, "one rule", fix)]
    return []
