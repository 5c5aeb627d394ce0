"""Rank, size, and the few collectives that a step needs, in three worlds that compute the same.

`Alone` is one rank. `Graph` is several cores of a TPU: the reduction is a part of the compiled step. `Gloo` is several
CPU processes: the reduction happens on the host, between two graphs. Everything is reduced in float32; counts travel
as float32 and are checked to fit (an int64 reduction crashes on a TPU).

Where each rank holds a part of a tensor, rank r holds part r of a `Cut`.
"""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import runtime

from xla_b2t.xla.compile_guard import may_compile
from xla_b2t.xla.cut import Cut
from xla_b2t.xla.device import to_device, to_host
from xla_b2t.xla.stop_order import StopOrder

_LARGEST_EXACT = 2**24
_FOR_EVER_S = 365 * 24 * 3600.0


class World(ABC):
    """What a rank knows of the others.

    Args:
        meeting_place: a private folder of the run, which the ranks share; "" where there is none.
    """

    rank: int
    size: int
    kind: Literal["tpu", "cpu"]
    reduces_in_graph: bool
    """False when a reduction ends the graph, so that what follows it is compiled by itself."""

    def __init__(self, meeting_place: str = ""):
        self._meeting_place = meeting_place
        self.stop_order = StopOrder(meeting_place)

    @abstractmethod
    def next_meeting(self, step: int, reading_every: int) -> int:
        """The first update from `step` on that no rank comes to before it has met this rank, which is before `step`.

        Args:
            step: an update that this rank has not begun.
            reading_every: updates after which every rank reads its core, and so waits for what all ranks reduce.
        """

    @abstractmethod
    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums float32 XLA tensors over all ranks; the tensors given must not be used afterwards."""

    @abstractmethod
    def reduce_scatter(self, tensors: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Sums float32 XLA tensors over all ranks and leaves to each rank its part of every sum.

        Args:
            tensors: whole; they must not be used afterwards.
            cuts: how each is cut.

        Returns:
            This rank's parts; and the sum of the squares of all the sums, 0-d float32, the same on all ranks. It comes
            with them because one more reduction would cut the step in two where ranks are processes.
        """

    @abstractmethod
    def all_gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        """Joins the parts of all ranks, XLA tensors of any dtype, to wholes on every core.

        Where ranks are processes it ends the graph, so it comes last in a step.
        """

    @abstractmethod
    def gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        """Joins the parts of all ranks to wholes on the host of rank 0, one after the other; other ranks get none.

        Outside a step, after `sync`; all ranks must call it together.
        """

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

    @abstractmethod
    def votes(self, vote: int, patience_s: float | None = None) -> list[int]:
        """Tells every rank a small number, on the host: no core has to be free for it.

        Args:
            vote: this rank's.
            patience_s: how long to wait for the others where ranks are cores; None waits until the run ends.

        Returns:
            One of each rank, in order; all ranks must call this equally often.

        Raises:
            TimeoutError: a rank has not voted.
        """


class Alone(World):
    """One rank, on a TPU core or on the CPU."""

    rank = 0
    size = 1
    reduces_in_graph = True

    def __init__(self, kind: Literal["tpu", "cpu"], meeting_place: str = ""):
        super().__init__(meeting_place)
        self.kind = kind

    def next_meeting(self, step: int, reading_every: int) -> int:
        return step

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def reduce_scatter(self, tensors: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [cut.fill(tensor) for tensor, cut in zip(tensors, cuts, strict=True)], sum_of_squares(tensors)

    def all_gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        return [cut.whole(part) for part, cut in zip(parts, cuts, strict=True)]

    def gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        return self.all_gather(to_host(parts), cuts)

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        return _checked(values, exact).astype(np.float64)

    def votes(self, vote: int, patience_s: float | None = None) -> list[int]:
        return [vote]


class Graph(World):
    """The cores that torch_xla has started; collectives are instructions of the graph."""

    reduces_in_graph = True
    groups: list[list[int]] | None = None
    """Which ordinals reduce together; None is all that torch_xla has started."""

    def __init__(self, meeting_place: str) -> None:
        super().__init__(meeting_place)
        self.rank = runtime.global_ordinal()
        self.size = runtime.world_size()
        self.kind = "tpu" if runtime.device_type() == "TPU" else "cpu"
        self._num_votes = 0

    def next_meeting(self, step: int, reading_every: int) -> int:
        # The host is ahead of its core, and stops only to read it: what it reads then was reduced with this rank.
        return (step // reading_every + 1) * reading_every

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        xm.all_reduce(xm.REDUCE_SUM, tensors, groups=self.groups)
        return tensors

    def reduce_scatter(self, tensors: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[torch.Tensor], torch.Tensor]:
        parts = [
            xm.reduce_scatter(
                xm.REDUCE_SUM, cut.fill(tensor), 1.0, cut.axis, self.size, groups=self.groups, pin_layout=False
            )
            for tensor, cut in zip(tensors, cuts, strict=True)
        ]
        # A TPU sums a large tensor as a whole and then takes the part of it. Without the barrier that taking is fused
        # into what uses the part, and all whole sums stay until there: 1.2 GiB more for 687 M parameters.
        xm.optimization_barrier_(parts)
        (squares,) = self.all_reduce([sum_of_squares(parts)])
        return parts, squares

    def all_gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        wholes = []
        for part, cut in zip(parts, cuts, strict=True):
            filled = torch.empty(cut.filled_shape, dtype=part.dtype, device=part.device)
            # Given an output, torch_xla puts it after the collective before it, as it does with the others; without one
            # nothing says in which order the ranks are to gather.
            xm.all_gather(part, cut.axis, groups=self.groups, output=filled, pin_layout=False)
            wholes.append(cut.whole(filled))
        return wholes

    def gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        found = []
        for part, cut in zip(parts, cuts, strict=True):
            with may_compile():
                wholes = self.all_gather([part], [cut])
                torch_xla.sync()
            found += to_host(wholes) if self.rank == 0 else []
        return found

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        device_values = torch.from_numpy(_checked(values, exact)).to(torch_xla.device())
        with may_compile():
            xm.all_reduce(xm.REDUCE_SUM, [device_values])
            torch_xla.sync()
        return _checked(device_values.cpu().numpy(), exact).astype(np.float64)

    def votes(self, vote: int, patience_s: float | None = None) -> list[int]:
        # A store of its own each time: a file that ranks read, whether they are processes or threads of one.
        self._num_votes += 1
        store = dist.FileStore(f"{self._meeting_place}/vote-{self._num_votes}", self.size)
        store.set(str(self.rank), str(vote))
        names = [str(rank) for rank in range(self.size)]
        try:
            store.wait(names, timedelta(seconds=_FOR_EVER_S if patience_s is None else patience_s))
        except RuntimeError as error:
            raise TimeoutError(f"no vote of every rank within {patience_s} s") from error
        return [int(store.get(name)) for name in names]


class Gloo(World):
    """CPU processes joined by `torch.distributed`; made after `dist.init_process_group("gloo")`."""

    kind = "cpu"
    reduces_in_graph = False

    def __init__(self, meeting_place: str = "") -> None:
        super().__init__(meeting_place)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def next_meeting(self, step: int, reading_every: int) -> int:
        return step + 1  # the end of an update is reduced on the host

    def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        torch_xla.sync()
        return to_device(_summed(to_host(tensors)))

    def reduce_scatter(self, tensors: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch_xla.sync()
        sums = _summed(to_host(tensors))  # gloo has no reduce-scatter
        host = [cut.part(whole, self.rank) for whole, cut in zip(sums, cuts, strict=True)]
        *parts, squares = to_device([*host, sum_of_squares(sums)])
        return parts, squares

    def all_gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        torch_xla.sync()
        host = to_host(parts)
        # As bytes: gloo does not know bfloat16.
        sent = torch.cat([part.reshape(-1).view(torch.uint8) for part in host])
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        num_bytes = [part.numel() * part.element_size() for part in host]
        pieces_RN = [rank_bytes.split(num_bytes) for rank_bytes in received]
        wholes = []
        for index, (part, cut) in enumerate(zip(host, cuts, strict=True)):
            pieces_R = [pieces_N[index].clone().view(part.dtype).reshape(part.shape) for pieces_N in pieces_RN]
            wholes.append(cut.whole(torch.cat(pieces_R, cut.axis)))
        return to_device(wholes)

    def gather(self, parts: list[torch.Tensor], cuts: list[Cut]) -> list[torch.Tensor]:
        found = []
        for part, cut in zip(parts, cuts, strict=True):
            (sent,) = to_host([part])
            received = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(sent, received)
            found += [cut.whole(torch.cat(received, cut.axis))] if received else []
        return found

    def sum(self, values: np.ndarray, exact: bool = True) -> np.ndarray:
        total = torch.from_numpy(_checked(values, exact).copy())
        dist.all_reduce(total)
        return _checked(total.numpy(), exact).astype(np.float64)

    def votes(self, vote: int, patience_s: float | None = None) -> list[int]:
        total = torch.zeros(self.size, dtype=torch.int64)
        total[self.rank] = vote
        dist.all_reduce(total)
        return total.tolist()


def _summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums of host tensors over the processes."""
    total = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(total)
    parts = total.split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """0-d float32, not read."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def _checked(values: np.ndarray, exact: bool) -> np.ndarray:
    countable = np.abs(values) <= _LARGEST_EXACT  # False for NaN
    if exact and not countable.all():
        worst = values[~countable][0]
        raise OverflowError(f"a count over ranks is {worst:.10g}, float32 counts exactly to 2**24 only")
    return values.astype(np.float32)
