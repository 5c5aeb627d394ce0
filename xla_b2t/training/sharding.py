"""What a rank holds of masters and moments: the whole, or with `optimizer.sharded` one part of R.

In: whole tensors, in the order of the parameters. Out: this rank's part of each, and wholes again, where they are
needed. Parts are cut along an axis (`xla/cut.py`); docs/decisions/0005-sharded-optimizer.md says why.
"""

import torch

from xla_b2t.xla.cut import cut_evenly
from xla_b2t.xla.device import to_host
from xla_b2t.xla.world import World, sum_of_squares


class Sharding:
    """How the state of one list of parameters is spread over the ranks.

    Args:
        shapes: of the parameters.
        sharded: False lets every rank hold everything.
        world: this rank among the others.
    """

    def __init__(self, shapes: list[tuple[int, ...]], sharded: bool, world: World):
        self._sharded = sharded
        self._world = world
        self._cuts = [cut_evenly(shape, world.size) for shape in shapes] if sharded else []

    def held(self, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank keeps of wholes on the host."""
        if not self._sharded:
            return wholes
        return [cut.part(whole, self._world.rank) for whole, cut in zip(wholes, self._cuts, strict=True)]

    def reduce(
        self, gradients: list[torch.Tensor], sums: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Sums over all ranks, in the step; what is given must not be used afterwards.

        Args:
            gradients: whole, float32, on the core.
            sums: float32, whatever else is to be summed.

        Returns:
            The sums of the gradients as far as this rank holds their state; the sum of the squares of all of them, 0-d;
            and the sums of `sums`.
        """
        if not self._sharded:
            *gradients, sums = self._world.all_reduce([*gradients, sums])
            return gradients, sum_of_squares(gradients), sums
        (sums,) = self._world.all_reduce([sums])
        return *self._world.reduce_scatter(gradients, self._cuts), sums

    def spread(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wholes on every core from what each rank holds; the last thing in a step."""
        return self._world.all_gather(held, self._cuts) if self._sharded else held

    def collect(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wholes on the host of rank 0, and nothing on the others; all ranks must call this together."""
        if self._sharded:
            return self._world.gather(held, self._cuts)
        return to_host(held) if self._world.rank == 0 else []
