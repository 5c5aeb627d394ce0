"""Predicted times of plain matmuls, copies and additions against the limits in the datasheets of three TPUs.

The limit is the time of the operations at the peak rate, or of the bytes at the full bandwidth of HBM, whichever is
more. What takes 20 us or longer must be predicted between 0.8 and 1.6 times its limit; a shorter program is mostly its
start, and its row is only shown. With `--kernels` the GRU kernels' predictions are held against the cycles that the
compiler scheduled for a step, which it writes down when it is asked to.

Usage: python benchmarks/roofline_tpu.py [--kernels]
Needs the extra `tpu-compiler`, and half a minute.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SLICES = ("v5e-4", "v4-8", "v6e-4")
LEAST, MOST, SHORT_US = 0.8, 1.6, 20.0
MATMULS = (
    *((size, size, size) for size in (256, 1024, 2048, 4096, 8192)),
    *((8, 4096, 4096), (64, 7168, 2304), (64, 7168, 21504), (4096, 128, 4096), (15808, 7168, 2304)),
)
ROWS = (64, 1024, 4096, 16384, 65536)
COLUMNS = 2048
WIDTHS = {"bf16": 2, "f32": 4}
KERNEL_SIZES = tuple((trials, hidden) for hidden in (512, 768) for trials in (8, 32, 64, 256))


@dataclass(frozen=True)
class Case:
    """A program, and what it has to do."""

    name: str
    text: str
    flops: float
    num_bytes: float


def main() -> int:
    """Prints a line for each program and chip; 1 where a prediction is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="the GRU kernels against their schedules")
    if parser.parse_args().kernels:
        show_kernels()
        return 0
    return show_roofline()


def show_roofline() -> int:
    """The table of plain programs."""
    from xla_b2t.memory.chips import CHIPS
    from xla_b2t.memory.step_time import predict
    from xla_b2t.xla.slices import slice_named
    from xla_b2t.xla.tpu_compiler import compile_programs

    cases, ratios = list(all_cases()), {}
    for name in SLICES:
        chip = CHIPS[slice_named(name).chip]
        verdicts = compile_programs([serialised(case.text) for case in cases], slice_named(name), 1)
        for case, verdict in zip(cases, verdicts, strict=True):
            limit_ms = max(case.flops / chip.bf16_tflops / 1e9, case.num_bytes / chip.hbm_gb_s / 1e6)
            found = predict(verdict.text, chip, 1)
            ratios[case.name, name] = (limit_ms * 1e3, found.ms / limit_ms, found.compiler_ms / limit_ms)
    print("limit in us, prediction / limit, (the compiler's estimates alone / limit)")
    print(f"{'':28}" + "".join(f"{name:26}" for name in SLICES))
    outside = 0
    for case in cases:
        row = f"{case.name:28}"
        for name in SLICES:
            limit_us, ratio, compilers = ratios[case.name, name]
            is_out = limit_us >= SHORT_US and not LEAST <= ratio <= MOST
            outside += is_out
            mark = "!" if is_out else "~" if limit_us < SHORT_US else " "
            row += f"{limit_us:8.1f} {ratio:5.2f}{mark} ({compilers:4.2f})   "
        print(row)
    print(f"{outside} of those that take {SHORT_US:.0f} us or longer lie outside {LEAST} to {MOST}; ~ takes less")
    return 1 if outside else 0


def all_cases() -> Iterator[Case]:
    """Matmuls in bf16; copies and additions in two widths."""
    for rows, summed, columns in MATMULS:
        shapes = f"bf16[{rows},{summed}]", f"bf16[{summed},{columns}]", f"bf16[{rows},{columns}]"
        yield Case(
            f"matmul {rows} x {summed} x {columns}",
            program(*shapes, "dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
            2.0 * rows * summed * columns,
            2.0 * (rows * summed + summed * columns + rows * columns),
        )
    for kind, width in WIDTHS.items():
        for rows in ROWS:
            shape, size = f"{kind}[{rows},{COLUMNS}]", rows * COLUMNS * width
            yield Case(f"copy {shape}", program(shape, shape, shape, "copy(a)"), 0.0, 2.0 * size)
            yield Case(f"add {shape}", program(shape, shape, shape, "add(a, b)"), 0.0, 3.0 * size)


def program(a: str, b: str, c: str, operation: str) -> str:
    """A program of one operation, as text."""
    return f"HloModule one\nENTRY one {{\n a = {a} parameter(0)\n b = {b} parameter(1)\n ROOT c = {c} {operation}\n}}\n"


def serialised(text: str) -> bytes:
    """The same as the compiler takes it."""
    from jaxlib import _jax

    return _jax.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def show_kernels() -> None:
    """The table of kernels, on v5e."""
    print("one step of the GRU kernels on v5e, in cycles: scheduled, bytes at 9/10 of the bandwidth, predicted")
    for trials, hidden in KERNEL_SIZES:
        for is_forward in (True, False):
            scheduled, moved, predicted = kernel_cycles(trials, hidden, is_forward)
            known = max(scheduled, moved)
            direction = "forward" if is_forward else "backward"
            print(
                f"B={trials:<4} H={hidden} {direction:9} {scheduled:6.0f} {moved:6.0f} {predicted:6.0f}  "
                f"{predicted / known - 1:+.0%}",
                flush=True,
            )


def kernel_cycles(trials: int, hidden: int, is_forward: bool, steps: int = 64) -> tuple[float, float, float]:
    """Of a step: the bundles that were scheduled, the time of its bytes, and the prediction."""
    import torch

    from xla_b2t.memory.chips import CHIPS
    from xla_b2t.memory.step_time import predict
    from xla_b2t.xla import gru_kernel
    from xla_b2t.xla.slices import slice_named
    from xla_b2t.xla.target import V5E, tracing_for
    from xla_b2t.xla.tpu_compiler import compile_program
    from xla_b2t.xla.trace import no_execution, placeholders, trace

    if is_forward:
        sizes = ((steps, trials, 3 * hidden), (trials, hidden), (hidden, 3 * hidden), (hidden,))
    else:
        stacks = ((steps, trials, hidden), (steps, trials, hidden), (trials, hidden), (steps, trials, 4 * hidden))
        sizes = (*stacks, (3 * hidden, hidden))
    with no_execution(), tracing_for(V5E):
        tensors = placeholders([torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes])
        kernel = (lambda *t: gru_kernel.forward(*t, keep=True)) if is_forward else gru_kernel.backward
        traced = trace([], lambda: kernel(*tensors))
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true")
        verdict = compile_program(traced, slice_named("v5e-4"), 1, flags)
        # A file for each operation, and one for the program; the kernel is by far the longest operation.
        paths = Path(folder).glob("*schedule-analysis_final_bundles.txt")
        schedules = [path.read_text() for path in paths if "-TLP-" not in path.name]
    bundles = [int(re.search(r"total scheduled bundles:\s*(\d+)", schedule).group(1)) for schedule in schedules]
    chip = CHIPS["v5e"]
    (part,) = (part for part in predict(verdict.text, chip, 1).parts if part.is_kernel)
    cycles_per_ms = chip.clock_ghz * 1e6
    moved_ms = part.hbm_bytes / (0.9 * chip.hbm_gb_s * 1e6)
    return max(bundles), moved_ms * cycles_per_ms / steps, part.ms * cycles_per_ms / steps


if __name__ == "__main__":
    sys.exit(main())
