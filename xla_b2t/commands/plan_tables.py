"""A memory plan as tables on stdout, for people."""

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from xla_b2t.config import Config
from xla_b2t.memory.allocations import Allocation
from xla_b2t.memory.plan import BatchSize, BucketPlan, Plan, ProgramPlan

if TYPE_CHECKING:
    from xla_b2t.memory.free_memory import Answer

_GIB, _MIB, _MB = 2**30, 2**20, 10**6
_LARGEST = 5
_LEAST = 2**16
"""Bytes; what is less is not shown."""
_FEWER_CORES = "Memory is each core's own: fewer cores never give a core more."


def _console() -> Console:
    # In a file or a pipe there is no width to keep to.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def print_plan(plan: Plan, config: Config, is_installed: bool) -> None:
    """Every bucket, what is in the neediest one, and what to make of it."""
    console = _console()
    model = config.model.factory or config.model.name
    by = f"arithmetic and by {plan.compiler}" if plan.compiler else "arithmetic alone"
    console.print(
        f"[bold]{model} on {plan.topology}[/bold]: {_cores(plan.num_ranks)} with {_size(plan.hbm_bytes)} of HBM each, "
        f"by {by}",
        soft_wrap=True,
    )
    micro = f" x {plan.accumulation} micro-steps" if plan.accumulation > 1 else ""
    console.print(f"{plan.batch_size} trials a core{micro}, {plan.global_batch} an update\n", soft_wrap=True)
    console.print(_buckets(plan))
    neediest = max(plan.buckets, key=lambda bucket: max(program.urgency() for program in bucket.programs))
    program = max(neediest.programs, key=ProgramPlan.urgency)
    console.print(_inside(neediest, program, plan))
    for line in _advice(plan):
        console.print(line, soft_wrap=True)
    if not is_installed:
        console.print(
            "The TPU's compiler is not installed: pip install 'xla_b2t\\[tpu-compiler]' with Python 3.11 or 3.12.",
            soft_wrap=True,
        )


def _buckets(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("bins", "updates", "arithmetic", "compiler", "of HBM", "an update", "trials/s", "limited by"):
        table.add_column(heading, justify="left" if heading == "limited by" else "right")
    for bucket in plan.buckets:
        needed_bytes = bucket.compiled_bytes or bucket.estimate_bytes
        training = bucket.programs[0]
        table.add_row(
            f"{bucket.input_bins:,}",
            f"{bucket.share:.0%}",
            _size(bucket.estimate_bytes),
            "" if bucket.compiled_bytes is None else _size(bucket.compiled_bytes),
            f"{needed_bytes / plan.hbm_bytes:.0%}",
            "" if bucket.predicted_step_ms is None else f"{bucket.predicted_step_ms:,.1f} ms",
            "" if bucket.trials_per_second is None else f"{bucket.trials_per_second:,.0f}",
            training.limited_by if bucket.fits else _misfit(bucket, plan),
        )
    return table


def _misfit(bucket: BucketPlan, plan: Plan) -> str:
    if bucket.compiled_bytes is None and not plan.compiler and bucket.estimate_bytes <= plan.hbm_bytes:
        return "[yellow]not sure: ask the compiler[/yellow]"
    return "[red]does not fit[/red]"


def _inside(bucket: BucketPlan, program: ProgramPlan, plan: Plan) -> Table:
    """What a core holds in the neediest program."""
    table = _figures(f"\nHBM with {bucket.input_bins:,} bins, program {program.program}")
    for words in program.refusal.splitlines():
        table.add_row("refused", words)
    for name, num_bytes in program.parts.items():
        if num_bytes >= _LEAST:
            table.add_row(_size(num_bytes), name)
    table.add_row(_size(program.beside_bytes), "beside: batches that wait, and state that this program does not touch")
    table.add_row(_size(plan.reserved_bytes), f"reserved by the system, beyond the {_size(plan.hbm_bytes)}")
    table.add_row("", "")
    for row in _largest(program):
        table.add_row(*row)
    return table


def _figures(title: str) -> Table:
    """A figure and what it is on every line."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    return table


def _largest(program: ProgramPlan) -> list[tuple[str, str]]:
    """Of each shape and line the number of allocations and the size of one, the largest together first."""
    alike: dict[tuple[str, str], list[Allocation]] = {}
    for allocation in program.largest:
        shape = allocation.shape.partition("{")[0]
        alike.setdefault((shape, allocation.where or allocation.what), []).append(allocation)
    rows = []
    for (shape, where), found in sorted(alike.items(), key=lambda item: -sum(one.bytes for one in item[1])):
        one = found[0]
        times = f"{len(found)} x " if len(found) > 1 else ""
        padding = f", {_size(one.unpadded_bytes)} without padding" if one.unpadded_bytes < 0.95 * one.bytes else ""
        rows.append((f"{times}{_size(one.bytes)}", f"{shape}{padding}  {where}"))
    return rows[:_LARGEST]


def _advice(plan: Plan) -> list[str]:
    left = f"with {100 * plan.margin:g} % left free"
    lines = [""]
    best, same = plan.recommended, plan.same_global_batch
    if best is None:
        lines.append(f"[red]No batch of any size fits[/red] {left}. {_FEWER_CORES}")
    else:
        more = "" if best.is_largest else " or more"
        micro = f" x {best.accumulation} micro-steps" if best.accumulation > 1 else ""
        lines.append(
            f"[bold]{plan.batch_size} trials a core configured, up to {best.batch_size}{micro}{more} fit[/bold] {left} "
            f"({_by(best)}). {_FEWER_CORES}"
        )
    if same and (same.batch_size, same.accumulation) != (plan.batch_size, plan.accumulation) and same.keys:
        lines.append(f"For the configured {same.global_batch} trials an update: {same.keys} ({_by(same)}).")
    if plan.hours is not None:
        lines.append(
            f"The trials of the run's {plan.updates:,} updates take {_hours(plan.hours)}, at "
            f"{plan.trials_per_second:,.0f} trials/s as predicted; start, compiling, validation and waiting for "
            "the host come on top."
        )
    if plan.host:
        gb = plan.host.rank_bytes / 1e9
        lines.append(f"Host memory of each rank: {gb:.1f} GB ({plan.host.rank_in_words()}).")
    return lines


def _by(found: BatchSize) -> str:
    return "by the compiler" if found.by_compiler else "by arithmetic; --batch-size auto asks the compiler"


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _hours(hours: float) -> str:
    if hours < 1 / 30:
        return f"{hours * 3600:.0f} seconds"
    return f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / _MIB:.1f} MiB"


def print_answer(answer: "Answer", num_parameters: int, input_bins: int, num_features: int) -> None:
    """What the rules for a device that is known by its free memory say."""
    console = _console()
    table = _figures(f"{num_parameters:,} parameters, trials of {input_bins:,} bins x {num_features} features")
    rows = (
        (answer.usable_bytes, f"usable, {answer.margin:.0%} of the free memory left alone".replace("%", " %")),
        (answer.weights_bytes, "weights"),
        (answer.optimizer_bytes, "optimizer"),
        (answer.gradient_bytes, "gradients"),
        (answer.activation_bytes, "activations"),
        (answer.per_batch_bytes, "for each batch"),
        (answer.per_sample_bytes, "for each trial"),
        (answer.required_bytes, f"required with {answer.batch_size} trials"),
    )
    for num_bytes, what in rows:
        table.add_row(f"{num_bytes / _MB:,.1f} MB", what)
    console.print(table)
    limit = "the cap" if answer.limited_by == "max_batch" else "the memory"
    console.print(
        f"[bold]{answer.batch_size} trials a batch[/bold], limited by {limit}; rules of thumb, not a verdict."
    )
