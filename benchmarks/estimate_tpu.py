"""HBM by arithmetic against HBM by the TPU's compiler: every bucket, three batch sizes, our models and three others.

The others stand for what users bring: a transformer and a stack of convolutions from the audit's corpus, at a sensible
size, and the Temporal Fusion Transformer of `examples/`. Each step is traced whole for eight cores, added up by
`memory/estimate.py`, and compiled for a v5e slice. What was compiled once is taken from the cache of verdicts, so that
a run that was cut short goes on where it was.

Usage: python benchmarks/estimate_tpu.py [--only gru_baseline tft] [--bins 400 2475] [--batches 16 64] [--no-compiler]
Needs the extra `tpu-compiler`; the first time two hours of one core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
CORES, SLICE, HBM_BYTES = 8, "v5e-8", int(15.75 * GIB)
BINS = (400, 600, 800, 1000, 1250, 1550, 1950, 2475)
DAYS, CLASSES, LABELS = 45, 41, 64
ROOT = Path(__file__).parents[1]
MODULES = ROOT / "tests" / "audit" / "corpus" / "modules"


@dataclass(frozen=True)
class Subject:
    """A model and its batch sizes."""

    config: Path | None
    overrides: tuple[str, ...]
    batches: tuple[int, int, int]
    features: int = 512


def _factory(path: Path, options: str = "{}") -> tuple[str, ...]:
    return f"model.factory={path}:build", f"model.options={options}"


SUBJECTS = {
    "gru_baseline": Subject(ROOT / "configs" / "gru_baseline.toml", (), (16, 64, 192)),
    "noise_split_687m": Subject(ROOT / "configs" / "noise_split_687m.toml", (), (16, 64, 128)),
    "transformer": Subject(
        None, _factory(MODULES / "transformer.py", "{width=512,heads=8,depth=2,longest=700}"), (16, 64, 128)
    ),
    "conv_stack": Subject(None, _factory(MODULES / "conv_stack.py", "{channels=512,dilations=[1,4]}"), (16, 64, 128)),
    "tft": Subject(None, _factory(ROOT / "examples" / "tft.py"), (16, 64, 128), features=225),
}


@dataclass
class Row:
    """One program."""

    model: str
    program: str
    bins: int
    batch: int
    path: Path
    estimate_bytes: int = 0
    with_margin_bytes: int = 0
    seconds: float = 0.0
    compiled_bytes: int = 0  # 0 where the compiler gave no figure
    fits: bool | None = field(default=None)

    @property
    def error_percent(self) -> float:
        """By how much the estimate is above the compiler's figure."""
        return 100 * (self.estimate_bytes / self.compiled_bytes - 1)


def main() -> int:
    """Prints the table; 1 where arithmetic says that a step fits and the compiler refuses it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--bins", type=int, nargs="+", default=list(BINS))
    parser.add_argument("--batches", type=int, nargs="+", help="in place of the three of each model")
    parser.add_argument("--no-compiler", action="store_true", help="arithmetic alone")
    parser.add_argument("--trace", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        trace(args.only[0], args.bins, args.batches, Path(args.trace))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in args.only for row in traced(name, args.bins, args.batches, Path(folder))]
        for row in rows:
            add_up(row)
        if not args.no_compiler:
            compile_all(rows)
    show(rows)
    return 1 if optimistic(rows) else 0


def traced(name: str, bins: list[int], batches: list[int] | None, folder: Path) -> list[Row]:
    """The programs of a model, traced in a process of its own."""
    from xla_b2t.xla.trace_environment import ENVIRONMENT

    sizes = batches or SUBJECTS[name].batches
    command = [sys.executable, __file__, "--only", name, "--trace", str(folder)]
    command += ["--bins", *map(str, bins), "--batches", *map(str, sizes)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
    found = [
        Row(name, program, T, B, folder / f"{name}.{program}.{T}.{B}.hlo")
        for program in ("train", "evaluate")
        for B in sizes
        for T in bins
    ]
    assert all(row.path.exists() for row in found)
    return found


def trace(name: str, bins: list[int], batches: list[int], folder: Path) -> None:
    """The child: writes programs, as bytes and as text."""
    from xla_b2t import config as configuration
    from xla_b2t.models.build import build_without_weights
    from xla_b2t.models.protocol import Sizes
    from xla_b2t.training.traced import blank_batch, traced_run
    from xla_b2t.xla.trace import hlo_text

    subject = SUBJECTS[name]
    config = configuration.load(subject.config, list(subject.overrides))
    model = build_without_weights(config.model, Sizes(subject.features, DAYS, CLASSES))
    with traced_run(model, CLASSES, config, CORES) as run:
        for T in bins:
            for B in batches:
                batch = blank_batch(B, T, subject.features, LABELS)
                programs = {**run.update(batch), "evaluate": run.evaluation(batch)}
                for program, hlo in programs.items():
                    path = folder / f"{name}.{program}.{T}.{B}.hlo"
                    path.write_bytes(hlo)
                    path.with_suffix(".txt").write_text(hlo_text(hlo))
                    roles = {number: (known.role, known.name) for number, known in run.parameters[program].items()}
                    path.with_suffix(".json").write_text(json.dumps(roles))


def add_up(row: Row) -> None:
    """The arithmetic."""
    from xla_b2t.memory.estimate import estimate
    from xla_b2t.training.traced import Parameter

    text = row.path.with_suffix(".txt").read_text()
    roles = json.loads(row.path.with_suffix(".json").read_text())
    began = time.process_time()
    found = estimate(text, {int(number): Parameter(*each) for number, each in roles.items()})
    row.seconds = time.process_time() - began
    row.estimate_bytes, row.with_margin_bytes = found.num_bytes, found.with_margin_bytes


def compile_all(rows: list[Row]) -> None:
    """The compiler's figures; what it is doing goes to stderr."""
    from xla_b2t.xla.slices import slice_named
    from xla_b2t.xla.tpu_compiler import compile_programs
    from xla_b2t.xla.verdict_cache import default_folder

    def tell(index: int, _verdict: object) -> None:
        row = rows[index]
        print(f"{index + 1}/{len(rows)} {row.model} {row.program} T={row.bins} B={row.batch}", file=sys.stderr)

    programs = [row.path.read_bytes() for row in rows]
    verdicts = compile_programs(programs, slice_named(SLICE), CORES, cache=default_folder(), on_verdict=tell)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.crash:
            print(f"{row.model} {row.program} T={row.bins} B={row.batch}: {verdict.crash}", file=sys.stderr)
            continue
        row.compiled_bytes = verdict.peak_bytes if verdict.accepted else 0
        row.fits = verdict.accepted and verdict.peak_bytes <= HBM_BYTES


def optimistic(rows: list[Row]) -> list[Row]:
    """Those that fit by arithmetic, its margin counted, and not by the compiler."""
    return [row for row in rows if row.fits is False and row.with_margin_bytes <= HBM_BYTES]


def show(rows: list[Row]) -> None:
    """The table: errors in percent for each bucket, or the estimate where the compiler has no figure; then the sums."""
    bins = sorted({row.bins for row in rows})
    print("| model | program | B |", " | ".join(f"T={T}" for T in bins), "| GiB |")
    print("| --- | --- | --: |", " | ".join("--:" for _ in bins), "| --- |")
    lines = {(row.model, row.program, row.batch): [] for row in rows}
    for row in rows:
        lines[row.model, row.program, row.batch].append(row)
    for (model, program, batch), line in lines.items():
        cells = [cell(row) for row in sorted(line, key=lambda row: row.bins)]
        sizes = [(row.compiled_bytes or row.estimate_bytes) / GIB for row in line]
        print(f"| {model} | {program} | {batch} |", " | ".join(cells), f"| {min(sizes):.2f} to {max(sizes):.2f} |")
    known = [row for row in rows if row.compiled_bytes]
    print(f"\n{len(rows)} programs, an estimate in {statistics.median(row.seconds for row in rows):.2f} s, "
          f"at most {max(row.seconds for row in rows):.2f} s")  # fmt: skip
    for name, part in {"all": known, **{model: [r for r in known if r.model == model] for model in SUBJECTS}}.items():
        if part:
            errors = [row.error_percent for row in part]
            print(
                f"{name}: median error {statistics.median(map(abs, errors)):.1f} %, "
                f"from {min(errors):+.1f} to {max(errors):+.1f}, {len(part)} programs"
            )
    for row in optimistic(rows):
        print(f"optimistic: {row.model} {row.program} T={row.bins} B={row.batch}, {row.estimate_bytes / GIB:.2f} GiB")
    refused = sum(row.fits is False for row in rows)
    print(f"{refused} do not fit by the compiler; {len(optimistic(rows))} of them fit by arithmetic with its margin")


def cell(row: Row) -> str:
    """One program of the table."""
    if row.compiled_bytes:
        return f"{row.error_percent:+.0f}" + ("" if row.fits else " (over)")
    return f"{row.estimate_bytes / GIB:.1f} GiB" + (" (refused)" if row.fits is False else "")


if __name__ == "__main__":
    sys.exit(main())
