"""What a run needs of a TPU core, in bytes and milliseconds: a plan, made on a machine that has no TPU.

In: a configuration, the slice that it is meant for, and the shapes of its data. Out: a `Plan`. The work is done in a
process that can trace (`planner.py`); this starts it and says what became of it.
"""

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from xla_b2t.errors import UserError
from xla_b2t.memory.allocations import Allocation
from xla_b2t.memory.host_memory import HostPlan
from xla_b2t.xla.tracing_process import LOG, is_running, tracing_process

PROGRESS = "progress.json"
TASK, PLAN, ERROR = "task.json", "plan.json", "error.json"
_POLL_S = 0.2
Tell = Callable[[str, int, int], None]
"""Told what is being done, how many of them are done, and how many there are."""


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    Attributes:
        config: the run's configuration, in TOML.
        topology: the slice, by Google's name.
        num_ranks: cores that train together.
        margin: share of a core's HBM that a plan leaves free.
        asks_compiler: False leaves it at arithmetic.
        searches: find the largest batch with the compiler, and plan for that one.
        input_bins: buckets to plan for in place of those of the data; empty takes the data's.
        num_features, num_days: of such data.
        cache: folder of the compiler's verdicts; "" for none.
    """

    config: str
    topology: str
    num_ranks: int
    margin: float
    asks_compiler: bool
    searches: bool
    input_bins: tuple[int, ...] = ()
    num_features: int = 0
    num_days: int = 0
    cache: str = ""


@dataclass(frozen=True)
class ProgramPlan:
    """One program that a core runs.

    Attributes:
        program: "train", or "micro" and "apply" where an update has several micro-steps; "evaluate".
        estimate_bytes: the most HBM in use while it runs, by arithmetic.
        compiled_bytes: the same by the compiler, with code and the gaps between allocations; None where it was not
            asked or gave no figure.
        beside_bytes: of both, what lies on the core and is no argument of it: the state that it does not use, and the
            batches that wait.
        fits: within HBM, by the compiler where it was asked; by arithmetic only with the margin that arithmetic needs.
        refusal: the compiler's words where it refused, or what became of it where it gave no answer.
        parts: bytes at the peak by what they are for; by the compiler's program where it was asked, else by arithmetic.
        largest: the largest allocations at the peak, from the same.
        milliseconds: predicted from the compiler's program; None without one.
        parts_ms: the same by what takes it.
        limited_by: what limits it: the matrix unit, HBM, the links, or none of them.
        tflop: floating-point operations of matmuls and kernels, in 1e12.
    """

    program: str
    estimate_bytes: int
    compiled_bytes: int | None
    beside_bytes: int
    fits: bool
    refusal: str = ""
    parts: dict[str, int] = field(default_factory=dict)
    largest: tuple[Allocation, ...] = ()
    milliseconds: float | None = None
    parts_ms: dict[str, float] = field(default_factory=dict)
    limited_by: str = ""
    tflop: float | None = None

    def urgency(self) -> tuple[bool, int]:
        """Orders programs by how much a reader wants to see them: refused ones last, then what needs most."""
        return bool(self.refusal), self.compiled_bytes or self.estimate_bytes


@dataclass(frozen=True)
class BucketPlan:
    """All programs of a bucket; figures of bytes are those of the program that needs most.

    Attributes:
        input_bins: T.
        share: of all updates, those of this bucket.
        estimate_bytes, compiled_bytes, fits, largest: as of `ProgramPlan`.
        predicted_step_ms: of a whole update, all its micro-steps together; None without the compiler.
        trials_per_second: over all cores, while updates are of this bucket.
    """

    input_bins: int
    share: float
    estimate_bytes: int
    compiled_bytes: int | None
    fits: bool
    predicted_step_ms: float | None
    trials_per_second: float | None
    largest: tuple[Allocation, ...]
    programs: tuple[ProgramPlan, ...]


@dataclass(frozen=True)
class BatchSize:
    """A batch that every bucket takes with the margin.

    Attributes:
        batch_size: trials a core and micro-step.
        accumulation: micro-steps an update.
        global_batch: trials an update.
        by_compiler: the compiler took it in every bucket; False where arithmetic says so.
        is_largest: the next larger one does not fit by the same judgement; False where none was looked at.
        keys: what to set for it; "" where only falling back leads to it.
    """

    batch_size: int
    accumulation: int
    global_batch: int
    by_compiler: bool
    is_largest: bool
    keys: str


@dataclass(frozen=True)
class Plan:
    """What a run needs.

    Attributes:
        topology: the slice, by Google's name.
        num_ranks: cores that train together.
        hbm_bytes: what programs may use of a core's HBM.
        reserved_bytes: of HBM besides, which the system keeps.
        margin: share of it that a recommendation leaves free.
        compiler: which compiler was asked, with its version; "" for none.
        compiled_programs: how many it compiled now; the others were remembered.
        batch_size, accumulation, global_batch: that the buckets are planned for.
        fits: every bucket does.
        buckets: in order of length.
        recommended: the largest batch a core that fits; None where none does.
        same_global_batch: the largest that keeps the configured global batch, with accumulation.
        updates: of the configured run.
        hours: the trials of those take, by the compiler's estimates; None without them.
        trials_per_second: over all cores and buckets, likewise.
        host: memory of the machine that the ranks need; None where nobody planned it.
        seconds: it took.
    """

    topology: str
    num_ranks: int
    hbm_bytes: int
    reserved_bytes: int
    margin: float
    compiler: str
    compiled_programs: int
    batch_size: int
    accumulation: int
    global_batch: int
    fits: bool
    buckets: tuple[BucketPlan, ...]
    recommended: BatchSize | None
    same_global_batch: BatchSize | None
    updates: int
    hours: float | None
    trials_per_second: float | None
    host: HostPlan | None = None
    seconds: float = 0.0


def make_plan(task: Task, tell: Tell = lambda stage, done, of: None) -> Plan:
    """Plans a run in a process of its own.

    Args:
        task: what is to be planned.
        tell: told how far it is.

    Raises:
        UserError: no such slice, no such data, no such model, a model whose step cannot be traced, no compiler.
        RuntimeError: a fault of ours in that process; its last words are in the message.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TASK).write_bytes(msgspec.json.encode(task))
        with tracing_process("xla_b2t.memory.child", folder) as child:
            told: dict[str, int] = {}
            while is_running(child, _POLL_S):
                _pass_on(folder / PROGRESS, told, tell)
        if child.returncode == 0:
            _pass_on(folder / PROGRESS, told, tell)
            plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
            return replace(plan, seconds=round(time.monotonic() - began, 2))
        if (folder / ERROR).exists():
            raise UserError(*msgspec.json.decode((folder / ERROR).read_bytes(), type=tuple[str, str, str]))
        log = (folder / LOG).read_text(errors="replace")
    if child.returncode == -signal.SIGKILL:
        raise UserError(
            "the process that made the plan was killed, probably because the machine's memory ran out",
            "this machine",
            "close other programs, or plan with --no-compiler",
        )
    if child.returncode < 0:
        raise UserError(
            f"an operation ended the process that traced the step with {signal.Signals(-child.returncode).name}",
            "the model's step",
            "run xla_b2t audit-dtypes, which names the operation and its line",
        )
    raise RuntimeError(f"the plan failed with {child.returncode}:\n{log[-4000:]}")


def _pass_on(path: Path, told: dict[str, int], tell: Tell) -> None:
    """What has changed since it was told last."""
    if path.exists():
        for stage, done, of in msgspec.json.decode(path.read_bytes(), type=list[tuple[str, int, int]]):
            if told.get(stage) != done:
                told[stage] = done
                tell(stage, done, of)
