"""Trains with one rank a thread and the reduction inside the graph, as on a TPU; run by test_worlds.py.

The threads stand in for the cores of a TPU host. On the CPU client of XLA their collectives meet only if the threads
trace and start each step one after the other, and if the client runs what it is given at once and has enough threads.

Usage: thread_ranks.py CONFIG NUM_RANKS OUTPUT [KEYS ...]. Each KEYS, such as "optimizer.sharded=true train.steps=4", is
a training of its own, one after the other. OUTPUT gets a list for each: what each rank found.

The words "refuse=0,2" among KEYS let the compiler of these ranks refuse the first graph for want of HBM. Where that is
not all of them, the others wait inside the graph for ever, and it must be the last training.
"""

import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

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
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import open_group_set
from xla_b2t.data.schedule import Schedule, deal
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training import step as training_step
from xla_b2t.training.step import TrainStep
from xla_b2t.xla import world as worlds
from xla_b2t.xla.attempt import OutOfHbm
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import sync, to_device, to_host
from xla_b2t.xla.feed import DeviceBatch, as_tensors

one_at_a_time = threading.Lock()
results = []
to_be_refused = set()


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


def sync_or_refuse():
    """As a compiler refuses it: torch_xla has forgotten by then what was traced. The lock is held."""
    rank = torch_xla.runtime.global_ordinal()
    if rank not in to_be_refused:
        return sync()
    to_be_refused.discard(rank)
    torch_xla._XLAC._set_allow_execution(False)
    try:
        sync()
    except RuntimeError:
        raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2G of 1G hbm.") from None
    finally:
        torch_xla._XLAC._set_allow_execution(True)


def run_rank(ordinal, trainings, output):
    """One rank, through all trainings."""
    for number, (config, refused) in enumerate(trainings):
        meeting_place = Path(output).parent / f"meeting-{number}"
        meeting_place.mkdir(exist_ok=True)
        if ordinal == 0:
            to_be_refused.update(refused)
        everyone.wait()
        try:
            train(ordinal, config, results[number], str(meeting_place))
        except UserError as error:
            results[number][ordinal] = {"error": error.args}
            everyone.wait()
            break
    if ordinal == 0:
        torch.save([[found[rank] for rank in sorted(found)] for found in results], output)
        os._exit(0)  # a core that waits inside a graph cannot be called back


def train(ordinal, config, found, meeting_place):
    """One rank in one training; what it found goes into `found`."""
    group_set = open_group_set(config.data.dir)
    world = InStep(meeting_place)
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
        while len(losses) < config.train.steps:
            number = len(losses)
            update = schedule.update(number)
            mine = deal(update.groups, plan.groups_per_update, world.size, plan.slots_per_update)[world.rank]
            batches = [DeviceBatch(*to_device(list(as_tensors(reader.read(groups, update.bucket))))) for groups in mine]
            try:
                step.run(number, update.bucket, iter(batches))
            except OutOfHbm as error:
                found[ordinal] |= {"refused": error.ranks}
                plan = plan.smaller()
                guard.forget("train", "apply")
                step.accumulate(plan.accumulation)
                continue
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
    training_step.sync = sync_or_refuse
    trainings = []
    for keys in map(str.split, sys.argv[4:]):
        refused = [int(rank) for key in keys if key.startswith("refuse=") for rank in key[len("refuse=") :].split(",")]
        config = configuration.load(sys.argv[1], [key for key in keys if not key.startswith("refuse=")])
        trainings.append((config, refused))
    results += [{} for _ in trainings]
    target = pjrt._SpawnFn(run_rank, trainings, sys.argv[3])
    pjrt._run_thread_per_device(0, 1, target, pjrt.initialize_multiprocess)
