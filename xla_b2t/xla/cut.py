"""How a tensor is cut into equal parts, one for each rank.

In: a shape and the number of parts. Out: a `Cut`, which turns wholes into parts and back. It knows shapes only: who
holds which part, and how parts travel, is left to `world`.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad


@dataclass(frozen=True)
class Cut:
    """Parts of one shape along one axis; zeros fill up the last ones.

    Attributes:
        shape: of the whole.
        axis: the one that is cut.
        num_parts: R.
    """

    shape: tuple[int, ...]
    axis: int
    num_parts: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of every part."""
        return tuple(
            -(-size // self.num_parts) if axis == self.axis else size for axis, size in enumerate(self.shape or (1,))
        )

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """Shape of the parts joined."""
        return tuple(size * self.num_parts if axis == self.axis else size for axis, size in enumerate(self.part_shape))

    def fill(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole with zeros at the end of the axis, so that the number of parts divides it."""
        whole = whole.reshape(self.shape or (1,))
        missing = self.filled_shape[self.axis] - whole.shape[self.axis]
        return pad(whole, [0, 0] * (whole.dim() - 1 - self.axis) + [0, missing]) if missing else whole

    def part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Part `index`, from 0, of the whole."""
        size = self.part_shape[self.axis]
        return self.fill(whole).narrow(self.axis, index * size, size)

    def whole(self, filled: torch.Tensor) -> torch.Tensor:
        """What was filled up, or joined from parts, without what was filled in."""
        return filled.narrow(self.axis, 0, (self.shape or (1,))[self.axis]).reshape(self.shape)


def cut_evenly(shape: tuple[int, ...], num_parts: int) -> Cut:
    """The cut with the least to fill in; among equal ones along the first axis, where parts lie together in memory.

    What is empty is cut along its first empty axis, into parts as empty.
    """
    sizes = shape or (1,)
    filled = [-(-size // num_parts) * num_parts / max(size, 1) for size in sizes]
    return Cut(tuple(shape), filled.index(min(filled)), num_parts)
