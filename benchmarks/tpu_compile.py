"""What the TPU's own compiler says to a whole training step, ours beside others, on a machine without a TPU.

The step is all of it: forward, loss, backward, reduction over the cores, clipping, update, with its buffers donated.
It is traced on placeholders and compiled by libtpu for one core of a v5e slice. Milliseconds are the compiler's own
estimates with loops counted by their trips; a Pallas kernel, which has none, counts the cycles of its schedule
(compiled once more, alone) or the time of its bytes, whichever is more. What the cores send each other is printed in
bytes and not timed.

Usage: python benchmarks/tpu_compile.py [--only ours torch_xla] [--bins 1000] [--batch 64] [--largest] [--lines 10]
Needs the extra `tpu-compiler`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
CLOCK_GHZ, HBM_BYTES, HBM_GB_S = 1.5, 15.75 * GIB, 819  # a v5e core, as the compiler and Google's pages have it
CORES, SLICE = 8, "v5e:2x4"
FEATURES, DAYS, CLASSES, LABELS = 512, 45, 41, 64
CONFIGS = Path(__file__).parents[1] / "configs"

BASELINE, THREE = CONFIGS / "gru_baseline.toml", CONFIGS / "noise_split_687m.toml"
CONTESTANTS = {
    "ours": (BASELINE, []),
    "ours, loop, no kernel": (BASELINE, ["model.options.kernel=false"]),
    "torch_xla nn.GRU": (BASELINE, []),
    "plain autograd scan": (BASELINE, []),
    "noise_split": (THREE, []),
    "noise_split, torch_xla nn.GRU": (THREE, []),
}
GRU_OF = {"torch_xla nn.GRU": "torch_xla", "noise_split, torch_xla nn.GRU": "torch_xla", "plain autograd scan": "scan"}


@dataclass(frozen=True)
class Row:
    """One contestant at one batch; the second half only where the compiler accepts it."""

    batch: int
    fits: bool
    words: str
    trace_s: float
    compile_s: float
    peak_gib: float = 0.0
    tflop: float = 0.0
    ms: float = 0.0
    kernel_ms: float = 0.0
    loop_ms: float = 0.0
    sent_mb: float = 0.0
    lines: tuple[tuple[float, str], ...] = ()


def main() -> None:
    """Prints a table, and the costliest lines of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=["ours", "torch_xla nn.GRU"])
    parser.add_argument("--bins", type=int, default=1000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="tried in turn until one fits")
    parser.add_argument("--largest", action="store_true", help="search the largest batch that fits, in steps of 16")
    parser.add_argument("--lines", type=int, default=0, help="costliest Python lines to print")
    parser.add_argument("--trace", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        trace(args.only[0], int(args.trace[0]), args.bins, args.trace[1])
        return
    print(f"one core of {SLICE}, {CORES} cores, T={args.bins}, {DAYS} days; {HBM_BYTES / GIB} GiB of HBM")
    for name in args.only:
        rows = largest(name, args.bins) if args.largest else until_fits(name, args.bins, args.batch)
        for row in rows:
            show(name, row, args.lines)


def until_fits(name: str, bins: int, batches: list[int]) -> Iterator[Row]:
    """Rows down to the first that fits."""
    for batch in batches:
        row = measure(name, batch, bins)
        yield row
        if row.fits:
            return


def largest(name: str, bins: int, step: int = 16) -> Iterator[Row]:
    """Rows of a search: two that fit give a line, whose end is tried and then walked along."""
    rows = [measure(name, batch, bins) for batch in (step, 2 * step)]
    yield from rows
    if not all(row.fits for row in rows):
        return
    slope = (rows[1].peak_gib - rows[0].peak_gib) / step
    batch = 2 * step + int((HBM_BYTES / GIB - rows[1].peak_gib) / slope) // step * step
    row = measure(name, batch, bins)
    yield row
    direction = 1 if row.fits else -1
    while True:
        batch += direction * step
        row = measure(name, batch, bins)
        yield row
        if row.fits != (direction == 1):
            return


def show(name: str, row: Row, num_lines: int) -> None:
    """One line of the table."""
    head = f"{name:30} B={row.batch:<4} trace {row.trace_s:4.1f} s, compile {row.compile_s:5.0f} s  "
    if not row.fits:
        print(f"{head}refused: {row.words}", flush=True)
        return
    print(
        f"{head}peak {row.peak_gib:5.2f} GiB  {row.tflop:5.2f} TFLOP  {row.ms:6.1f} ms "
        f"(kernels {row.kernel_ms:.1f}, loops {row.loop_ms:.1f})  {row.batch / row.ms * 1000:5.0f} trials/s a core  "
        f"sends {row.sent_mb:.0f} MB",
        flush=True,
    )
    for milliseconds, line in row.lines[:num_lines]:
        print(f"    {milliseconds:7.2f} ms  {line}")


def measure(name: str, batch: int, bins: int) -> Row:
    """Traces and compiles one contestant."""
    from xla_b2t.memory import compiled_program
    from xla_b2t.xla.tpu_compiler import compile_program
    from xla_b2t.xla.trace_environment import ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.hlo"
        command = [sys.executable, __file__, "--only", name, "--bins", str(bins), "--trace", str(batch), str(path), "-"]
        began = time.monotonic()
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
        trace_s = time.monotonic() - began
        verdict = compile_program(path.read_bytes(), SLICE, CORES)
        if not verdict.accepted or verdict.peak_bytes > HBM_BYTES:
            words = re.search(r"Used [^.]*\.\d+\w of \S+ hbm|Allocation \(size=\d+\)[^:]*", verdict.refusal)
            said = words.group() if words else f"peak {verdict.peak_bytes / GIB:.2f} GiB"
            return Row(batch, False, said, trace_s, verdict.seconds)
        program = compiled_program.parse(verdict.text)
        found = compiled_program.costs(program, HBM_GB_S / CLOCK_GHZ)
        kernels = [cost for cost in found if "tpu_custom_call" in cost.instruction.text]
        cycles = scheduled_cycles(verdict.text, batch, bins) if kernels else {}
        kernel_cycles = sum(max(cost.cycles, cycles[is_forward(cost)]) for cost in kernels)
        rest = [cost for cost in found if cost not in kernels]
        sent_shapes = [cost.instruction.shape.replace("S(1)", "") for cost in found if cost.kind == "collective"]
        sent = sum(compiled_program.num_bytes(shape) for shape in sent_shapes)
        lines = [(count / CLOCK_GHZ / 1e6, shortened(source)) for source, count in compiled_program.by_source(rest)]
        return Row(
            batch,
            True,
            "",
            trace_s,
            verdict.seconds,
            verdict.peak_bytes / GIB,
            compiled_program.flops(program, found) / 1e12,
            (kernel_cycles + sum(cost.cycles for cost in rest)) / CLOCK_GHZ / 1e6,
            kernel_cycles / CLOCK_GHZ / 1e6,
            sum(cost.cycles for cost in rest if cost.loops) / CLOCK_GHZ / 1e6,
            sent / 1e6,
            tuple(lines),
        )


def shortened(source: str) -> str:
    """Without what stands before the package."""
    return re.sub(r".*/(xla_b2t|site-packages)/", r"\1/", source)


def is_forward(cost) -> bool:
    """Two results, or one, leave the forward kernel; four the backward one."""
    return cost.instruction.shape.count("[") <= 2


def scheduled_cycles(text: str, batch: int, bins: int) -> dict[bool, float]:
    """Cycles of the forward and the backward kernel over all steps, from the bundles that the compiler scheduled."""
    import torch

    from xla_b2t.xla import gru_kernel
    from xla_b2t.xla.target import V5E, tracing_for
    from xla_b2t.xla.tpu_compiler import compile_program
    from xla_b2t.xla.trace import no_execution, placeholders
    from xla_b2t.xla.trace import trace as trace_program

    steps, hidden = (bins - 14) // 4 + 1, 768
    shapes = {
        True: ((steps, batch, 3 * hidden), (batch, hidden), (hidden, 3 * hidden), (hidden,)),
        False: (
            *((steps, batch, hidden), (steps, batch, hidden), (batch, hidden)),
            *((steps, batch, 4 * hidden), (3 * hidden, hidden)),
        ),
    }
    found = {}
    for forward, sizes in shapes.items():
        with no_execution(), tracing_for(V5E):
            tensors = placeholders([torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes])
            kernel = (lambda *t: gru_kernel.forward(*t, keep=True)) if forward else gru_kernel.backward
            program = trace_program([], lambda kernel=kernel, tensors=tensors: kernel(*tensors))
        with tempfile.TemporaryDirectory() as folder:
            compile_program(program, SLICE, 1, (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true"))
            # A file for each operation, and one for the program; the kernel is by far the longest operation.
            paths = Path(folder).glob("*schedule-analysis_final_bundles.txt")
            schedules = [path.read_text() for path in paths if "-TLP-" not in path.name]
        bundles = [int(re.search(r"total scheduled bundles:\s*(\d+)", schedule).group(1)) for schedule in schedules]
        found[forward] = steps * max(bundles)
    return found


def trace(name: str, batch: int, bins: int, path: str) -> None:
    """The child: writes the program of one contestant."""
    import torch

    from xla_b2t import config as configuration
    from xla_b2t.models.build import build_model
    from xla_b2t.models.protocol import Sizes
    from xla_b2t.training.traced import blank_batch, trace_train_step

    file, overrides = CONTESTANTS[name]
    config = configuration.load(file, overrides)
    with torch.device("meta"):
        model = build_model(config.model, Sizes(FEATURES, DAYS, CLASSES))
        if name in GRU_OF:
            replace_stacks(model, GRU_OF[name])
    program = trace_train_step(model, CLASSES, config, CORES, blank_batch(batch, bins, FEATURES, LABELS))
    Path(path).write_bytes(program)


def replace_stacks(model, kind: str) -> None:
    """Puts another implementation in the place of every `GruStack`."""
    from xla_b2t.models.gru import GruStack

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, GruStack):
                setattr(parent, name, other_stack(child, kind))


def other_stack(ours, kind: str):
    """torch_xla's `nn.GRU`, or a scan over the cell that autograd differentiates, with the parameters of ours."""
    import torch
    import torch.nn.functional as F
    import torch_xla  # noqa: F401  puts its own GRU in the place of torch.nn.GRU
    from torch import nn
    from torch_xla.experimental.scan import scan

    class TorchXla(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(ours.weight_ih_l0.shape[1], ours.hidden, ours.layers, dropout=ours.dropout)

        def forward(self, inputs, initial):
            return self.gru(inputs, initial.expand(self.gru.num_layers, inputs.shape[1], -1).contiguous())[0]

    def cell(carry, projected):
        recurrent = F.linear(carry["h"], carry["w"], carry["b"])
        x, h = projected.chunk(3, 1), recurrent.chunk(3, 1)
        reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
        new = torch.tanh(x[2] + reset * h[2])
        state = (1 - update) * new + update * carry["h"]
        return {"h": state, "w": carry["w"] + 0, "b": carry["b"] + 0}, state + 0

    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.ours = ours

        def forward(self, inputs, initial):
            for layer in range(ours.layers):
                sequence = inputs if layer == 0 else F.dropout(sequence, ours.dropout, self.training)  # noqa: F821
                names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
                w_ih, b_ih, w_hh, b_hh = (getattr(self.ours, f"{name}_l{layer}") for name in names)
                first = initial[min(layer, initial.shape[0] - 1)].expand(inputs.shape[1], -1).contiguous()
                _, sequence = scan(cell, {"h": first, "w": w_hh, "b": b_hh}, F.linear(sequence, w_ih, b_ih))
            return sequence

    return TorchXla() if kind == "torch_xla" else Scan()


if __name__ == "__main__":
    main()
