"""Results as tables on stdout, for people; `--json` is for programs."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from xla_b2t.audit.findings import Report

_PHASES = ("start", "preflight", "compile", "train", "validate", "checkpoint")
_EXAMPLES = 3


def print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    """The result of a training run."""
    console = Console(highlight=False)
    table = _two_columns(
        f"{summary['status']}: {summary['steps']:,} updates on {summary['cores']} {summary['world']} ranks"
    )
    if summary["val_per"] is not None:
        table.add_row("val PER", f"{summary['val_per']:.2%}   best {summary['best_val_per']:.2%}")
        for session, per in summary["val_per_by_day"].items():
            table.add_row(f"  {session}", f"{per:.2%}")
    table.add_row("train loss", f"{summary['train_loss_first']:.2f} -> {summary['train_loss_last']:.3f} nats a trial")
    table.add_row(
        "speed",
        f"{summary['trials_per_second']:,.0f} trials/s, {summary['step_ms_median']:.0f} ms an update in the median",
    )
    table.add_row(
        "compiles", f"{summary['compiles']} on rank 0, {summary['compiles_after_warmup']} after warm-up, "
        f"{summary['host_fallbacks']} host fallbacks",
    )  # fmt: skip
    table.add_row("padding efficiency", f"{summary['padding_efficiency']:.1%} real bins")
    seconds = summary["seconds"]
    table.add_row("seconds", "  ".join(f"{name} {seconds[name]:.1f}" for name in _PHASES if name in seconds))
    table.add_row("files", f"{run_dir}/ (summary.json, events.jsonl, checkpoints/)")
    console.print(table)


def print_evaluation(result: dict[str, Any], predictions: list[dict], output: str | None) -> None:
    """The result of decoding a split, with a few trials to look at."""
    console = Console(highlight=False)
    head = f", head {result['head']}" if result["head"] else ""
    table = _two_columns(f"{result['split']}: {result['trials']} trials, {result['checkpoint']}{head}")
    if result["per"] is not None:
        table.add_row("PER", f"{result['per']:.2%} ({result['errors']:,} errors in {result['phonemes']:,} phonemes)")
        for session, per in result["per_by_day"].items():
            table.add_row(f"  {session}", f"{per:.2%}")
    for prediction in predictions[:_EXAMPLES]:
        table.add_row(prediction["trial"], " ".join(prediction["phonemes"]))
    table.add_row("sequences", output or "not kept; --output FILE writes them")
    console.print(table)


def print_export(result: dict[str, Any], next_step: str) -> None:
    """Which files were written, of what, and what to do with them."""
    console = Console(highlight=False)
    table = _two_columns(f"{result['format']}: step {result['step']:,} of {result['checkpoint']}")
    if result["val_per"] is not None:
        table.add_row("val PER", f"{result['val_per']:.2%}")
    for file in result["files"]:
        table.add_row("wrote", file)
    table.add_row("next", next_step)
    console.print(table)


def print_report(report: Report) -> None:
    """What a preflight says: a line, or a block for each finding."""
    console = Console(highlight=False)
    for number, finding in enumerate(report.findings, 1):
        table = _two_columns(f"{number}. {finding.kind}: {finding.name}")
        table.add_row("  found", finding.found)
        if finding.expected:
            table.add_row("  expected", finding.expected)
        table.add_row("  where", finding.where)
        table.add_row("  fix", finding.fix)
        console.print(table)
    for line in (*report.exceptions, summary_of(report)):
        console.print(line, soft_wrap=True, markup=False)


def summary_of(report: Report) -> str:
    """How much was looked at, and what came of it, in a line."""
    counts = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in report.checked.items())
    found = {0: "clean", 1: "1 finding"}.get(len(report.findings), f"{len(report.findings)} findings")
    needs = f"; {report.planned_bytes / 2**30:.2f} GiB of HBM a core, by arithmetic" if report.planned_bytes else ""
    return f"{found}: {counts or 'the numbers alone'} in {report.seconds:.1f} s{needs}"


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
