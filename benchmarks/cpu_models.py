"""Seconds of forward, loss and backward on a CPU: our decoder, torch_xla's own `nn.GRU`, PyTorch without XLA.

Three contestants, each in float32 and in bfloat16 (weights, activations and gradients), on one batch with dropout on:
- `ours`: `GruDecoder` and our CTC loss on XLA:CPU, one graph, with the flags a rank has (`xla/rank.py`);
- `torch_xla nn.GRU`: the same graph with the recurrent layers replaced by `torch_xla.experimental.gru.GRU`, which is
  what `torch.nn.GRU` is once torch_xla is imported;
- `PyTorch eager`: the decoder as one writes it without XLA, with the native `nn.GRU`, `F.dropout` and `F.ctc_loss` (in
  float32, as it has no bfloat16).
Noise, smoothing and the optimizer are left out for all of them.

Each contestant is a process of its own that lives through the run and is held to the same cores. They take single steps
in turn, so that what else the machine does falls on all of them alike. Ratios are medians of the ratios of one turn.

torch_xla's GRU stacks one gradient of the input weights for each step: 10 GB at 600 bins in float32, and half as much
again of smaller ones. A contestant that asks for more than `--memory-gb` is shown as such, instead of bringing the
machine down; `--bins 200` leaves room for all.

Usage: python benchmarks/cpu_models.py [--size baseline|demo|both] [--bins 600] [--repeats 7] [--threads 2]
    [--memory-gb 12] [--only ours]
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

CONTESTANTS = ("ours", "torch_xla nn.GRU", "PyTorch eager")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Size:
    """A decoder and its batch; the letters are those of docs/ARCHITECTURE.md."""

    options: dict[str, float]
    trials: int
    bins: int
    features: int
    days: int
    classes: int = 41
    labels: int = 30


SIZES = {
    "baseline": Size({}, trials=16, bins=600, features=512, days=45),
    "demo": Size(
        {"patch_bins": 8, "patch_stride": 4, "hidden": 128, "layers": 2, "dropout": 0.3, "input_dropout": 0.2},
        trials=8,
        bins=400,
        features=64,
        days=4,
    ),
}


def main() -> None:
    """Prints one table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=(*SIZES, "both"), default="both")
    parser.add_argument("--bins", type=int, help="length of every trial, in place of the size's own")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-gb", type=float, default=12, help="that a contestant may have")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=CONTESTANTS, action="append", help="this contestant; may be repeated")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        contestant, dtype, shape = args.child
        take_part(contestant, dtype, Size(**json.loads(shape)), args.threads, args.memory_gb)
        return
    for size in SIZES if args.size == "both" else (args.size,):
        shape = replace(SIZES[size], bins=args.bins) if args.bins else SIZES[size]
        print_table(size, shape, args.only or list(CONTESTANTS), args)


def print_table(size: str, shape: Size, contestants: list[str], args: argparse.Namespace) -> None:
    """Runs the contestants of one size in turn and prints their medians."""
    repeats, threads = args.repeats, args.threads
    rows = [(contestant, dtype) for dtype in DTYPES for contestant in contestants]
    children = {row: start(*row, shape, args) for row in rows}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {row: [] for row in rows}
    compiled = {}
    for row, child in children.items():
        compiled[row] = take_step(child)
        take_step(child)
    gone = [row for row in rows if take_step(children[row]) is None]
    load = os.getloadavg()[0]
    for _ in range(repeats):
        for row, child in children.items():
            if row not in gone:
                found[row].append(take_step(child))
    for child in children.values():
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.wait()
    print(
        f"{size}: {shape.trials} trials, {shape.bins} bins, {shape.features} features; forward, loss, backward; "
        f"{threads} threads; medians of {repeats}; {cpu_name()}; {time.strftime('%Y-%m-%d')}; "
        f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    print(f"{'':28}{'first':>9}{'step':>11}{'CPU':>11}   times PyTorch eager")
    for contestant, dtype in rows:
        if (contestant, dtype) in gone:
            print(f"{contestant + ', ' + dtype:28}  died, exit code {children[contestant, dtype].returncode}")
            continue
        wall, cpu = (statistics.median(column) for column in zip(*found[contestant, dtype], strict=True))
        line = f"{contestant + ', ' + dtype:28}{compiled[contestant, dtype][0]:7.1f} s"
        line += f"{1000 * wall:8.0f} ms{1000 * cpu:8.0f} ms"
        if ("PyTorch eager", dtype) in found:
            pairs = zip(found[contestant, dtype], found["PyTorch eager", dtype], strict=True)
            line += f"   {statistics.median(mine[0] / eager[0] for mine, eager in pairs):.2f}"
        print(line)
    print(flush=True)


def start(contestant: str, dtype: str, shape: Size, args: argparse.Namespace) -> subprocess.Popen:
    """A contestant's process, which waits for `take_step`."""
    threads = str(args.threads)
    command = [sys.executable, __file__, "--threads", threads, "--memory-gb", str(args.memory_gb)]
    command += ["--child", contestant, dtype, json.dumps(asdict(shape))]
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "XLA_RNG_BIT_GENERATOR": "three_fry"}
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": threads}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def take_step(child: subprocess.Popen) -> tuple[float, float] | None:
    """Wall and CPU seconds of one step; None if the process is gone."""
    assert child.stdin and child.stdout
    try:
        child.stdin.write("\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    line = child.stdout.readline()
    return tuple(json.loads(line)) if line else None


def take_part(contestant: str, dtype: str, size: Size, threads: int, memory_gb: float) -> None:
    """One process: a step for each line on stdin."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_gb * 1e9),) * 2)
    # XLA's thread pools are as large as the number of cores the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    build = {"ours": own_step, "torch_xla nn.GRU": torch_xla_step, "PyTorch eager": eager_step}[contestant]
    step = build(size, getattr(torch, dtype))
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        loss = step()
        seconds = time.perf_counter() - began, time.process_time() - used
        assert 0 < loss < 1e6, f"a loss of {loss}"
        print(json.dumps(seconds), flush=True)


def make_batch(size: Size) -> tuple[Any, ...]:
    """features_BTC, input_bins_B, days_B, labels_BL, label_lengths_B on the host, the same for every contestant."""
    import torch

    generator = torch.Generator().manual_seed(2)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    features_BTC = torch.randn(size.trials, size.bins, size.features, generator=generator)
    input_bins_B = draw(size.bins * 3 // 4, size.bins + 1, size.trials)
    labels_BL = draw(1, size.classes, size.trials, size.labels)
    days_B, lengths_B = draw(0, size.days, size.trials), draw(size.labels // 2, size.labels + 1, size.trials)
    return features_BTC, input_bins_B, days_B, labels_BL, lengths_B


def own_decoder(size: Size) -> Any:
    """Our decoder with float32 weights on the host."""
    import msgspec

    from xla_b2t.models.gru_decoder import GruDecoder, GruDecoderOptions
    from xla_b2t.models.protocol import Sizes

    options = msgspec.convert(size.options, GruDecoderOptions)
    return GruDecoder(Sizes(size.features, size.days, size.classes), options)


def own_step(size: Size, dtype: Any) -> Callable[[], float]:
    """Our decoder on XLA:CPU."""
    return xla_step(own_decoder(size), size, dtype)


def torch_xla_step(size: Size, dtype: Any) -> Callable[[], float]:
    """The same with torch_xla's GRU in it."""
    import torch
    import torch_xla.experimental.gru

    decoder = own_decoder(size)

    class Stack(torch_xla.experimental.gru.GRU):
        """Takes one first state for all layers and trials, and leaves the last one out."""

        def forward(self, inputs_PBF: torch.Tensor, initial_LBH: torch.Tensor) -> torch.Tensor:
            first_LBH = initial_LBH.expand(self.num_layers, inputs_PBF.shape[1], -1).contiguous()
            return super().forward(inputs_PBF, first_LBH)[0]

    options = decoder.options
    stack = Stack(options.patch_bins * size.features, options.hidden, options.layers, dropout=options.dropout)
    stack.load_state_dict(decoder.gru.state_dict())
    decoder.gru = stack
    return xla_step(decoder, size, dtype)


def xla_step(decoder: Any, size: Size, dtype: Any) -> Callable[[], float]:
    """Forward, loss and backward as one graph that is waited for."""
    import torch

    from xla_b2t.models.ctc import ctc_loss
    from xla_b2t.xla.device import device, sync, to_device, to_host

    features_BTC, *rest = make_batch(size)
    features_BTC, input_bins_B, days_B, labels_BL, lengths_B = to_device([features_BTC.to(dtype), *rest])
    decoder = decoder.to(dtype).to(device()).train()
    sync(wait=True)

    def step() -> float:
        for parameter in decoder.parameters():
            parameter.grad = None
        output = decoder(features_BTC, input_bins_B, days_B)
        loss = ctc_loss(output.logits_BPK, labels_BL, output.steps_B, lengths_B).sum()
        loss.backward()
        sync()
        (value,) = to_host([loss.detach()])
        assert all(torch.is_tensor(parameter.grad) for parameter in decoder.parameters())
        return value.item() / size.trials

    return step


def eager_step(size: Size, dtype: Any) -> Callable[[], float]:
    """The same decoder in plain PyTorch; torch_xla is not imported, so `nn.GRU` is PyTorch's."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    defaults = {"patch_bins": 14, "patch_stride": 4, "hidden": 768, "layers": 5, "dropout": 0.4, "input_dropout": 0.2}
    options = {**defaults, **size.options}
    patch_bins, stride = options["patch_bins"], options["patch_stride"]
    hidden, layers = options["hidden"], options["layers"]
    assert "torch_xla" not in sys.modules, "torch_xla replaces nn.GRU"
    gru = nn.GRU(patch_bins * size.features, hidden, layers, batch_first=True, dropout=options["dropout"])
    day_weight = nn.Parameter(torch.eye(size.features).repeat(size.days, 1, 1))
    day_bias, h0 = nn.Parameter(torch.zeros(size.days, 1, size.features)), nn.Parameter(torch.zeros(1, 1, hidden))
    parameters = nn.ParameterDict({"day_weight": day_weight, "day_bias": day_bias, "h0": h0}).to(dtype)
    gru, out = gru.to(dtype).train(), nn.Linear(hidden, size.classes).to(dtype)
    features_BTC, input_bins_B, days_B, labels_BL, lengths_B = make_batch(size)
    features_BTC = features_BTC.to(dtype)
    steps_B = (input_bins_B - patch_bins) // stride + 1

    def step() -> float:
        for parameter in (*parameters.parameters(), *gru.parameters(), *out.parameters()):
            parameter.grad = None
        weight_BCC, bias_B1C = parameters["day_weight"][days_B], parameters["day_bias"][days_B]
        mapped_BTC = F.softsign(torch.bmm(features_BTC, weight_BCC) + bias_B1C)
        mapped_BTC = F.dropout(mapped_BTC, options["input_dropout"])
        windows_BPCW = mapped_BTC.unfold(1, patch_bins, stride)
        sequence_BPF = windows_BPCW.transpose(2, 3).flatten(2)
        hidden_BPH, _ = gru(sequence_BPF, parameters["h0"].expand(layers, size.trials, hidden).contiguous())
        log_probs_PBK = out(hidden_BPH).float().log_softmax(2).transpose(0, 1)
        loss = F.ctc_loss(log_probs_PBK, labels_BL, steps_B, lengths_B, reduction="sum")
        loss.backward()
        return loss.item() / size.trials

    return step


def cpu_name() -> str:
    """The processor's name as the kernel has it."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
