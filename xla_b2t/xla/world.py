"""Rank, size, and the few collectives that a step needs, in three worlds that compute the same.

`Alone` is one rank. `Graph` is several cores of a TPU: the reduction is a part of the compiled step. `Gloo` is several
CPU processes: the reduction happens on the host, between two graphs. Everything is reduced in float32; counts travel
as float32 and are checked to fit (an int64 reduction crashes on a TPU).
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import runtime

from xla_b2t.xla.compile_guard import may_compile

_LARGEST_EXACT = 2**24


class World(ABC):
    """What a rank knows of the others."""

    rank: int
    size: int
    kind: Literal["tpu", "cpu"]
    reduces_in_graph: bool
    """False when a reduction ends the graph, so that what follows it is compiled by itself."""

    @abstractmethod
    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums float32 XLA tensors over all ranks; the tensors given must not be used afterwards."""

    @abstractmethod
    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        """Sums a float64 host vector of one fixed length over all ranks, in float32.

        Args:
            values: (N,) counts, or measured values with `exact=False`; the same choice on all ranks.
            exact: refuse what float32 may not count exactly. False lets every value through, rounded to float32, also
                one that is not finite: sums of losses are for the reader, and 1e30 says "impossible" as well as any.

        Returns:
            (N,) float64, the same on all ranks.

        Raises:
            OverflowError: `exact`, and a value is beyond 2**24 or not a number, here or in the sum.
        """

    def agree(self, value: bool) -> bool:
        """True on every rank when any rank says so."""
        return bool(self.sum(np.array([float(value)]))[0] > 0)

    def gather(self, value: float) -> np.ndarray:
        """(R,) float: every rank's value, the same on all ranks; exact for whole numbers below 2**24."""
        values = np.zeros(self.size)
        values[self.rank] = value
        return self.sum(values)


class Alone(World):
    """One rank, on a TPU core or on the CPU."""

    rank = 0
    size = 1
    reduces_in_graph = True

    def __init__(self, kind: Literal["tpu", "cpu"]):
        self.kind = kind

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        return _checked(values, exact).astype(np.float64)


class Graph(World):
    """The cores that torch_xla has started; collectives are instructions of the graph."""

    reduces_in_graph = True

    def __init__(self) -> None:
        self.rank = runtime.global_ordinal()
        self.size = runtime.world_size()
        self.kind = "tpu" if runtime.device_type() == "TPU" else "cpu"

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        xm.all_reduce(xm.REDUCE_SUM, tensors)
        return tensors

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        device_values = torch.from_numpy(_checked(values, exact)).to(torch_xla.device())
        with may_compile():
            xm.all_reduce(xm.REDUCE_SUM, [device_values])
            torch_xla.sync()
        return _checked(device_values.cpu().numpy(), exact).astype(np.float64)


class Gloo(World):
    """CPU processes joined by `torch.distributed`; made after `dist.init_process_group("gloo")`."""

    kind = "cpu"
    reduces_in_graph = False

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        torch_xla.sync()
        host = [tensor.reshape(-1) for tensor in torch_xla._XLAC._xla_get_cpu_tensors(tensors)]
        total = torch.cat(host)
        dist.all_reduce(total)
        parts = [
            part.reshape(tensor.shape)
            for part, tensor in zip(total.split([part.numel() for part in host]), tensors, strict=True)
        ]
        return xm.send_cpu_data_to_device(parts, torch_xla.device())

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        total = torch.from_numpy(_checked(values, exact).copy())
        dist.all_reduce(total)
        return _checked(total.numpy(), exact).astype(np.float64)


def _checked(values: np.ndarray, exact: bool) -> np.ndarray:
    countable = np.abs(values) <= _LARGEST_EXACT  # False for NaN
    if exact and not countable.all():
        worst = values[~countable][0]
        raise OverflowError(f"a count over ranks is {worst:.10g}, float32 counts exactly to 2**24 only")
    return values.astype(np.float32)
