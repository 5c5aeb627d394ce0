"""The core of this rank: tensors onto it and off it, its random numbers, and the end of a graph.

These few calls are all that training needs of torch_xla beside the world and the feed.
"""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm

_RANDOM_STREAM = 0x6E6F6973  # "nois": keeps this stream apart from the schedule's


def device() -> torch.device:
    """The XLA device of this rank (of this thread, where ranks are threads)."""
    return torch_xla.device()


def sync(wait: bool = False) -> None:
    """Ends the graph: everything traced since the last call is compiled, if it is new, and started."""
    torch_xla.sync(wait=wait)


def to_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies CPU tensors to the core in one transfer; no graph is made."""
    return xm.send_cpu_data_to_device(tensors, torch_xla.device())


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors of the core to the host in one transfer, after `sync`. Waits for what computes them."""
    return torch_xla._XLAC._xla_get_cpu_tensors(tensors)


def set_noise(seed: int, rank: int, step: int, micro_step: int) -> None:
    """Sets the core's random numbers for one micro-step. A new seed is an input of the graph, not a new graph.

    Keyed by what it is for, never by the order of calls, so that a resumed run draws what the first would have drawn.
    """
    state = np.random.SeedSequence([seed, _RANDOM_STREAM, rank, step, micro_step]).generate_state(1)[0]
    xm.set_rng_state(int(state), torch_xla.device())
