"""What the TPU's own compiler says to a whole training step, ours beside others, on a machine without a TPU.

The step is all of it: forward, loss, backward, reduction over the cores, clipping, update, with its buffers donated.
It is traced on placeholders, for all devices of a slice, and compiled by libtpu for one of them. Milliseconds are
predicted (`xla_b2t/memory/step_time.py`); benchmarks/roofline_tpu.py holds the prediction against what is known.

Usage: python benchmarks/tpu_compile.py [--only ours torch_xla] [--bins 1000] [--batch 64] [--largest] [--lines 10]
       [--slice v5e-8]
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

from xla_b2t.memory.chips import CHIPS
from xla_b2t.xla.slices import Slice, slice_named

GIB = 2**30
FEATURES, DAYS, CLASSES, LABELS = 512, 45, 41, 64
CONFIGS = Path(__file__).parents[1] / "configs"

BASELINE, THREE = CONFIGS / "gru_baseline.toml", CONFIGS / "noise_split_687m.toml"
CONTESTANTS = {
    "demo": (CONFIGS / "demo.toml", []),
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
    """One contestant at one batch. What follows `compile_s` is there if it fits, but `largest` if it does not."""

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
    limits: tuple[tuple[str, float], ...] = ()
    lines: tuple[tuple[float, str], ...] = ()
    largest: tuple = ()


def main() -> None:
    """Prints a table, and the costliest lines of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=["ours", "torch_xla nn.GRU"])
    parser.add_argument("--bins", type=int, default=1000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="tried in turn until one fits")
    parser.add_argument("--largest", action="store_true", help="search the largest batch that fits, in steps of 16")
    parser.add_argument("--lines", type=int, default=0, help="costliest Python lines to print")
    parser.add_argument("--slice", default="v5e-8", help="by the name that Google gives it")
    parser.add_argument("--trace", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    goal = slice_named(args.slice)
    if args.trace:
        trace(args.only[0], int(args.trace[0]), args.bins, goal, args.trace[1])
        return
    hbm = CHIPS[goal.chip].hbm_bytes / GIB
    print(f"a device of {goal.name}, {goal.cores} of them, T={args.bins}, {DAYS} days; {hbm:.2f} GiB of HBM")
    for name in args.only:
        rows = largest(name, args.bins, goal) if args.largest else until_fits(name, args.bins, args.batch, goal)
        for row in rows:
            show(name, row, args.lines)


def until_fits(name: str, bins: int, batches: list[int], goal: Slice) -> Iterator[Row]:
    """Rows down to the first that fits."""
    for batch in batches:
        row = measure(name, batch, bins, goal)
        yield row
        if row.fits:
            return


def largest(name: str, bins: int, goal: Slice, step: int = 16) -> Iterator[Row]:
    """Rows of a search: two that fit give a line, whose end is tried and then walked along."""
    rows = [measure(name, batch, bins, goal) for batch in (step, 2 * step)]
    yield from rows
    if not all(row.fits for row in rows):
        return
    slope = (rows[1].peak_gib - rows[0].peak_gib) / step
    hbm_gib = CHIPS[goal.chip].hbm_bytes / GIB
    batch = 2 * step + int((hbm_gib - rows[1].peak_gib) / slope) // step * step
    row = measure(name, batch, bins, goal)
    yield row
    direction = 1 if row.fits else -1
    while True:
        batch += direction * step
        row = measure(name, batch, bins, goal)
        yield row
        if row.fits != (direction == 1):
            return


def show(name: str, row: Row, num_lines: int) -> None:
    """One line of the table."""
    head = f"{name:30} B={row.batch:<4} trace {row.trace_s:4.1f} s, compile {row.compile_s:5.0f} s  "
    if not row.fits:
        print(f"{head}refused: {row.words}", flush=True)
        for one in row.largest:
            print(f"    {one.bytes / GIB:7.2f} GiB  {one.shape.partition('{')[0]}  {one.what}  {shortened(one.where)}")
        return
    print(
        f"{head}peak {row.peak_gib:5.2f} GiB  {row.tflop:5.2f} TFLOP  {row.ms:6.1f} ms "
        f"(kernels {row.kernel_ms:.1f}, loops {row.loop_ms:.1f})  {row.batch / row.ms * 1000:5.0f} trials/s a device  "
        f"sends {row.sent_mb:.0f} MB; " + ", ".join(f"{limit} {ms:.1f}" for limit, ms in row.limits),
        flush=True,
    )
    for milliseconds, line in row.lines[:num_lines]:
        print(f"    {milliseconds:7.2f} ms  {line}")


def measure(name: str, batch: int, bins: int, goal: Slice) -> Row:
    """Traces and compiles one contestant."""
    from xla_b2t.memory import refusal
    from xla_b2t.memory.step_time import predict
    from xla_b2t.xla.tpu_compiler import compile_program
    from xla_b2t.xla.trace_environment import ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.hlo"
        options = ["--only", name, "--bins", str(bins), "--slice", goal.name, "--trace", str(batch), str(path)]
        command = [sys.executable, __file__, *options]
        began = time.monotonic()
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
        trace_s = time.monotonic() - began
        chip = CHIPS[goal.chip]
        verdict = compile_program(path.read_bytes(), goal, goal.cores)
        if not verdict.accepted or verdict.peak_bytes > chip.hbm_bytes:
            why = refusal.explained(verdict, {}, 3)
            said = why.words or f"peak {verdict.peak_bytes / GIB:.2f} GiB"
            return Row(batch, False, said, trace_s, verdict.seconds, largest=why.largest)
        found = predict(verdict.text, chip, goal.cores)
        return Row(
            batch,
            True,
            "",
            trace_s,
            verdict.seconds,
            verdict.peak_bytes / GIB,
            found.flops / 1e12,
            found.ms,
            found.kernel_ms,
            found.loop_ms,
            found.sent_bytes / 1e6,
            tuple(found.ms_by_limit.items()),
            tuple((ms, shortened(source)) for source, ms in found.ms_by_source.items()),
        )


def shortened(source: str) -> str:
    """Without what stands before the package."""
    return re.sub(r".*/(xla_b2t|site-packages)/", r"\1/", source)


def trace(name: str, batch: int, bins: int, goal: Slice, path: str) -> None:
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
    shapes = blank_batch(batch, bins, FEATURES, LABELS)
    program = trace_train_step(model, CLASSES, config, goal.cores, shapes, goal.kind)
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
