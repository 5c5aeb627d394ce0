"""Every graph of a run at any batch size, traced when it is asked for, with what it needs by arithmetic.

In: a configuration and what it is planned for. Out: `Graph`s. A core holds more than a program's arguments: the
optimizer's state while a split is decoded, and the batches that the feed keeps ready. That is counted beside each.
"""

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from msgspec.structs import replace

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import batches_ahead
from xla_b2t.errors import UserError
from xla_b2t.memory.allocations import Allocation
from xla_b2t.memory.estimate import Estimate, estimate
from xla_b2t.memory.layout import padded_bytes
from xla_b2t.memory.subject import Subject
from xla_b2t.models.build import build_without_weights
from xla_b2t.training.traced import Parameter, TracedRun, blank_batch, traced_run
from xla_b2t.xla.feed import DeviceBatch
from xla_b2t.xla.frames import blamed, shown
from xla_b2t.xla.trace import hlo_text

T = TypeVar("T")
_LONGEST_MESSAGE = 300
_KINDS = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "s32", torch.int64: "s64", torch.bool: "pred"}


@dataclass(frozen=True)
class Graph:
    """One program of a run.

    Attributes:
        name: "train"; "micro" and "apply" where an update has several micro-steps; "evaluate".
        program: serialised HloModuleProto.
        parameters: what the program's parameters are, by number.
        beside_bytes: what lies on the core while it runs and is no argument of it.
        estimate: HBM of the program, by arithmetic.
    """

    name: str
    program: bytes
    parameters: dict[int, Parameter]
    beside_bytes: int
    estimate: Estimate

    @property
    def needed_bytes(self) -> int:
        """HBM in use while it runs, by arithmetic."""
        return self.estimate.num_bytes + self.beside_bytes

    @property
    def sure_bytes(self) -> int:
        """What must be there for it to fit for sure, as far as arithmetic can be sure."""
        return self.estimate.with_margin_bytes + self.beside_bytes

    @property
    def largest(self) -> tuple[Allocation, ...]:
        """The largest that is held at the fullest moment, by arithmetic."""
        return tuple(
            Allocation(held.bytes, held.unpadded_bytes, held.shape, held.what, shown(held.where) if held.where else "")
            for held in self.estimate.largest
        )


class Graphs:
    """Traces on demand, each graph once.

    Args:
        config: of the run.
        subject: of the plan.
        num_ranks: cores that train together.
        kind: of the cores, as PJRT names it.
        stack: closes what is opened here.
    """

    def __init__(self, config: Config, subject: Subject, num_ranks: int, kind: str, stack: ExitStack):
        self._config, self._subject, self._num_ranks, self._kind = config, subject, num_ranks, kind
        self._stack = stack
        self._runs: dict[bool, TracedRun] = {}
        self._updates: dict[tuple[int, int, bool], list[Graph]] = {}
        self._evaluations: dict[tuple[int, int, int, bool], Graph] = {}

    def update(self, bucket: int, trials: int, accumulates: bool) -> list[Graph]:
        """The programs of an update: one, or two where it has several micro-steps.

        Args:
            bucket: its index.
            trials: B of a micro-step.
            accumulates: whether it has several.
        """
        key = bucket, trials, accumulates
        if key not in self._updates:
            run = self._run(accumulates)
            programs = _traced(lambda: run.update(self._batch(bucket, trials)))
            waiting = self._waiting_bytes(trials)
            self._updates[key] = [graph_of(run, name, program, waiting) for name, program in programs.items()]
        return self._updates[key]

    def evaluation(self, bucket: int, trials: int, train_trials: int, accumulates: bool) -> Graph:
        """The program that decodes a batch, in the midst of training.

        Args:
            bucket: its index.
            trials: B of the batch that is decoded.
            train_trials: B in training, whose batches wait meanwhile.
            accumulates: as of `update`.
        """
        key = bucket, trials, train_trials, accumulates
        if key not in self._evaluations:
            run = self._run(accumulates)
            program = _traced(lambda: run.evaluation(self._batch(bucket, trials)))
            waiting = self._waiting_bytes(trials) + self._waiting_bytes(train_trials)
            self._evaluations[key] = graph_of(run, "evaluate", program, waiting)
        return self._evaluations[key]

    def _run(self, accumulates: bool) -> TracedRun:
        if accumulates not in self._runs:
            train = replace(self._config.train, accumulation=2 if accumulates else 1)
            config, sizes = replace(self._config, train=train), self._subject.sizes
            model = build_without_weights(config.model, sizes)
            opened = traced_run(model, sizes.num_classes, config, self._num_ranks, self._kind)
            self._runs[accumulates] = self._stack.enter_context(opened)
        return self._runs[accumulates]

    def _batch(self, bucket: int, trials: int) -> DeviceBatch:
        shape = self._subject.buckets[bucket]
        return blank_batch(trials, shape.input_bins, self._subject.sizes.num_features, shape.label_slots)

    def _waiting_bytes(self, trials: int) -> int:
        """Of the longest bucket, since any may be next."""
        longest = max(range(len(self._subject.buckets)), key=lambda index: self._subject.buckets[index].input_bins)
        return waiting_bytes(self._batch(longest, trials), self._config)


def _traced(trace: Callable[[], T]) -> T:
    try:
        return trace()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's model raises
        frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        file, line = blamed(frames) or ("the model's step", 0)
        raise UserError(
            f"the step cannot be traced: {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_MESSAGE]}",
            f"{shown(file)}:{line}",
            "run xla_b2t audit-dtypes, which says what is wrong with it and how to mend it; buckets of --bins must "
            "be long enough for the model",
        ) from error


def graph_of(run: TracedRun, name: str, program: bytes, waiting_bytes: int) -> Graph:
    """A program that was traced, added up.

    Args:
        run: that traced it, the last of its name.
        name: of the program.
        program: serialised.
        waiting_bytes: of batches that lie ready on the core meanwhile.
    """
    parameters = run.parameters[name]
    beside_bytes = _bytes(run.beside(name)) + waiting_bytes
    return Graph(name, program, parameters, beside_bytes, estimate(hlo_text(program), parameters))


def waiting_bytes(batch: DeviceBatch, config: Config) -> int:
    """The feed's batches: its queue is full, as many are on their way into it, and the next is in the loop's hand.

    Source: torch_xla/distributed/parallel_loader.py, which sends as many at once as its queue holds.
    """
    ahead = batches_ahead(config.data.prefetch_mb, sum(tensor.nbytes for tensor in batch))
    return (2 * ahead + 1) * _bytes(batch)


def _bytes(tensors: list[torch.Tensor] | DeviceBatch) -> int:
    return sum(padded_bytes(_KINDS[tensor.dtype], tuple(tensor.shape)) for tensor in tensors)
