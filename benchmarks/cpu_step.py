"""CPU seconds to compile and to run one rank's training step, by compiler flags.

Each row is a process of its own, since XLA reads its flags once. CPU seconds, not wall time: what eight ranks on two
cores wait for is the sum. Rows are repeated in turn, and medians are printed.

Usage: python benchmarks/cpu_step.py [--repeats 3] [--dtype bfloat16]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

FLAGS = {
    "defaults": {},
    "three_fry": {"XLA_RNG_BIT_GENERATOR": "three_fry"},
    "three_fry, optimization level 1": {
        "XLA_RNG_BIT_GENERATOR": "three_fry", "XLA_FLAGS": "--xla_backend_optimization_level=1"
    },
    "three_fry, no fusion emitters": {
        "XLA_RNG_BIT_GENERATOR": "three_fry", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"
    },
    "three_fry, both (what crowded ranks use)": {
        "XLA_RNG_BIT_GENERATOR": "three_fry",
        "XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false",
    },
}  # fmt: skip
STEPS = 10


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--groups", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.groups:
        measure(args.groups, args.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        groups = make_groups(folder)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in FLAGS}
        for _ in range(args.repeats):
            for name, variables in FLAGS.items():
                command = [sys.executable, __file__, "--groups", groups, "--dtype", args.dtype]
                environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", **variables}
                shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                found[name].append(tuple(json.loads(shown.stdout)))
    print(f"demo model, {args.dtype}, one rank's 8 trials; medians of {args.repeats}")
    for name, rows in found.items():
        compiled, step = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:42} compile {compiled:5.2f} s   step {1000 * step:6.1f} ms")


def make_groups(folder: str) -> str:
    """The demo's groups."""
    from xla_b2t.commands.demo_data import PREBATCH, SYNTH
    from xla_b2t.data.prebatch import prebatch
    from xla_b2t.data.synth import synthesize

    synthesize(f"{folder}/trials", SYNTH)
    prebatch(f"{folder}/trials", f"{folder}/groups", PREBATCH)
    return f"{folder}/groups"


def measure(groups: str, dtype: str) -> None:
    """Prints [seconds of the first step, seconds of a later one], of CPU time, both graphs of a rank included."""
    import torch

    torch.set_num_threads(1)
    from xla_b2t import config as configuration
    from xla_b2t.data.group_reader import GroupReader
    from xla_b2t.data.groups import open_group_set
    from xla_b2t.models.build import build_model
    from xla_b2t.models.protocol import sizes_of
    from xla_b2t.training.step import TrainStep
    from xla_b2t.xla.compile_guard import CompileGuard
    from xla_b2t.xla.device import sync, to_device
    from xla_b2t.xla.feed import DeviceBatch, as_tensors
    from xla_b2t.xla.world import Alone

    config = configuration.load("xla_b2t/demo.toml", [f"model.dtype={dtype}"])
    group_set = open_group_set(groups)
    sizes = sizes_of(group_set)
    world = Alone("cpu")
    world.reduces_in_graph = False  # gradients, and their application, are two graphs, as among processes
    step = TrainStep(build_model(config.model, sizes), sizes.num_classes, config, world, CompileGuard())
    bucket = int(group_set.splits["train"].bucket_G[0])
    host = as_tensors(GroupReader(group_set, "train").read([0], bucket))
    seconds = []
    for repeats in (1, STEPS):
        began = time.process_time()
        for _ in range(repeats):
            step.run(1, bucket, iter([DeviceBatch(*to_device(list(host)))]))
        step.totals()
        sync(wait=True)
        seconds.append((time.process_time() - began) / repeats)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
