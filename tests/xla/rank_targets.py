"""What ranks do in the tests of `xla.spawn`: a target must be importable by another process."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from xla_b2t.errors import UserError
from xla_b2t.xla import rank


def write_sums(world, folder):
    """Reduces on the core and on the host, and writes what each rank got."""
    import torch

    from xla_b2t.xla.device import sync, to_device, to_host

    tensors = to_device([torch.full((3,), float(world.rank + 1)), torch.eye(2) * world.rank])
    reduced = world.all_reduce([tensor * 2 for tensor in tensors])
    sync()
    on_core = [tensor.tolist() for tensor in to_host(reduced)]
    on_host = world.sum(np.array([1.0, world.rank])).tolist()
    Path(folder, f"{world.rank}.txt").write_text(repr((on_core, on_host)))


def write_parts(world, folder):
    """Cuts sums into parts, joins the parts in two ways, and writes what each rank got."""
    import torch

    from xla_b2t.xla.cut import cut_evenly
    from xla_b2t.xla.device import to_device, to_host

    wholes = [torch.arange(14.0).reshape(2, 7), torch.tensor(3.0), torch.ones(6, 2)]
    cuts = [cut_evenly(tuple(whole.shape), world.size) for whole in wholes]
    parts, squares = world.reduce_scatter(to_device([whole * (world.rank + 1) for whole in wholes]), cuts)
    shapes = [tuple(part.shape) for part in parts]
    on_host = [whole.tolist() for whole in world.gather(parts, cuts)]
    mixed = [parts[0].bfloat16(), *parts[1:]]
    joined = to_host([*world.all_gather(mixed, cuts), squares])
    found = shapes, on_host, [str(whole.dtype) for whole in joined], [whole.tolist() for whole in joined]
    Path(folder, f"{world.rank}.txt").write_text(repr(found))


def fail_on_rank_one(world, how):
    """Fails in the way that is asked for on rank 1, while the others wait for it."""
    if world.rank == 1:
        if how == "exception":
            raise ValueError("a fault on rank 1")
        if how == "user error":
            raise UserError("found 3", "file.h5", "give 4")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    world.sum(np.ones(1))


def sleep_after_mark(world, folder):
    """Says that it is up, with its process id, and waits for ever."""
    Path(folder, f"{world.rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def write_rank(world, folder):
    """Writes who this rank is, and where it runs."""
    import threading

    Path(folder, f"{world.rank}.txt").write_text(
        repr((world.size, os.getpid(), threading.current_thread() is threading.main_thread()))
    )


def fail_on_rank_one_of_threads(world):
    """Fails on rank 1, while rank 0 would go on for long."""
    if world.rank == 1:
        raise ValueError("a fault on rank 1")
    time.sleep(600)


def die_on_last_rank(world, how, folder):
    """The process of the last rank dies without a word, when the others are up."""
    Path(folder, f"{world.rank}.up").touch()
    if world.rank == world.size - 1:
        _die_when_all_are_up(how, folder, world.size)
    time.sleep(600)


def launch_pool(meeting_place, how):
    """Does what torch_xla's launcher does on a host with three chips, without the chips."""
    context = multiprocessing.get_context("spawn")
    with rank._naming_the_dead(meeting_place), ProcessPoolExecutor(3, context) as pool:
        list(pool.map(_pool_rank, range(3), [meeting_place] * 3, [how] * 3))


def _pool_rank(rank, meeting_place, how):
    Path(meeting_place, f"rank-{rank}.pid").write_text(str(os.getpid()))
    Path(meeting_place, f"{rank}.up").touch()
    if rank == 2:
        _die_when_all_are_up(how, meeting_place, 3)
    time.sleep(600)


def _die_when_all_are_up(how, folder, num_ranks):
    while not all(Path(folder, f"{rank}.up").exists() for rank in range(num_ranks)):
        time.sleep(0.05)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))


def kill_parent(world):
    """Kills the process that started this one."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
