"""What ranks do in the tests of `xla.spawn`: a target must be importable by another process."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from xla_b2t.errors import UserError


def write_sums(world, folder):
    """Reduces on the core and on the host, and writes what each rank got."""
    import torch

    from xla_b2t.xla.device import sync, to_device, to_host

    tensors = to_device([torch.full((3,), float(world.rank + 1)), torch.eye(2) * world.rank])
    reduced = world.all_reduce([tensor * 2 for tensor in tensors])
    sync()
    on_core = [tensor.tolist() for tensor in to_host(reduced)]
    on_host = world.sum(np.array([1.0, world.rank])).tolist()
    gathered = world.gather(10 * world.rank).tolist()
    agreed = [world.agree(world.rank == world.size - 1), world.agree(False)]
    Path(folder, f"{world.rank}.txt").write_text(repr((on_core, on_host, gathered, agreed)))


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
