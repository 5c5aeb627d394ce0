"""Trains with one rank a thread and the reduction inside the graph, as on a TPU; run by test_worlds.py.

The threads stand in for the cores of a TPU host. On the CPU client of XLA their collectives meet only if the threads
trace and start each step one after the other, and if the client runs what it is given at once and has enough threads.

Usage: thread_ranks.py CONFIG NUM_RANKS OUTPUT [KEYS ...]. Each KEYS, such as "optimizer.sharded=true train.steps=4", is
a training of its own, one after the other. OUTPUT gets a list for each: what each rank found.
"""

import os
import sys
import threading
from contextlib import contextmanager

os.environ.update(
    PJRT_DEVICE="CPU",
    CPU_NUM_DEVICES=sys.argv[2],
    PJRT_CPU_ASYNC_CLIENT="0",
    XLA_THREAD_POOL_SIZE=str(4 * int(sys.argv[2])),
)

import torch
import torch_xla
from torch_xla._internal import pjrt

from xla_b2t import config as configuration
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.data.groups import GroupReader, open_group_set
from xla_b2t.data.schedule import Schedule, deal
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training.step import TrainStep
from xla_b2t.xla import world as worlds
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import to_device, to_host
from xla_b2t.xla.feed import DeviceBatch, as_tensors

one_at_a_time = threading.Lock()
results = []


class InTurn(CompileGuard):
    """Lets one rank at a time trace and start a graph; reading what it gives must wait for the others, unlocked."""

    @contextmanager
    def watch(self, *arguments):
        with one_at_a_time, super().watch(*arguments):
            yield


class InStep(worlds.Graph):
    """Starts no graph before all ranks have started the one before it, for which starting would wait with the lock."""

    def gather(self, parts, cuts):
        found = []
        for part, cut in zip(parts, cuts, strict=True):
            found += super().gather([part], [cut])
            everyone.wait()
        return found


@contextmanager
def may_compile_in_turn():
    """The same for graphs outside a step."""
    with one_at_a_time, may_compile():
        yield


def run_rank(ordinal, configs, output):
    """One rank, through all trainings."""
    for number, config in enumerate(configs):
        train(ordinal, config, results[number])
    if ordinal == 0:
        torch.save([[found[rank] for rank in sorted(found)] for found in results], output)


def train(ordinal, config, found):
    """One rank in one training; what it found goes into `found`."""
    group_set = open_group_set(config.data.dir)
    world = InStep()
    assert (world.rank, world.size) == (ordinal, int(sys.argv[2]))
    plan = plan_batches(config, group_set.group_size, world.size)
    schedule = Schedule("epochs", group_set.splits["train"], config.run.seed, plan.groups_per_update)
    guard = InTurn()
    sizes = sizes_of(group_set)
    step = TrainStep(build_model(config.model, sizes, seed=config.run.seed), sizes.num_classes, config, world, guard)
    held = sum(getattr(slot, column).numel() for slot in step.slots for column in ("master", "moment1", "moment2"))
    found[ordinal] = {"held": held, "initial": parameters(step.model)}
    losses = []
    with GroupReader(group_set, "train") as reader:
        for number in range(config.train.steps):
            update = schedule.update(number)
            mine = deal(update.groups, plan.groups_per_update, world.size, plan.accumulation)[world.rank]
            batches = [DeviceBatch(*to_device(list(as_tensors(reader.read(groups, update.bucket))))) for groups in mine]
            step.run(number, update.bucket, iter(batches))
            everyone.wait()
            losses.append(step.totals().mean_loss)
    counts = guard.compiles, guard.compiles_after_warmup, guard.host_fallbacks
    found[ordinal] |= {"losses": losses, "final": parameters(step.model), "counts": counts}
    state = step.state()
    assert (state is None) == (world.rank != 0)
    found[ordinal] |= {"state": state and vars(state)}
    everyone.wait()


def parameters(model):
    """What this rank computes with, by name."""
    named = dict(model.named_parameters())
    return dict(zip(named, to_host([parameter.detach() for parameter in named.values()]), strict=True))


if __name__ == "__main__":
    may_compile, worlds.may_compile = worlds.may_compile, may_compile_in_turn
    everyone = threading.Barrier(int(sys.argv[2]))
    assert torch_xla.runtime.device_type() == "CPU"
    # What each process of `xmp.spawn` does with its devices.
    configs = [configuration.load(sys.argv[1], keys.split()) for keys in sys.argv[4:]]
    results += [{} for _ in configs]
    target = pjrt._SpawnFn(run_rank, configs, sys.argv[3])
    pjrt._run_thread_per_device(0, 1, target, pjrt.initialize_multiprocess)
