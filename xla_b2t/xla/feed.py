"""Batches onto the core, in the background, with nothing lost on the way.

In: an iterable of host batches and how many there must be. Out: the same batches on the core. torch_xla's
`MpDeviceLoader` ends an epoch silently when the thread that reads fails; here the failure is carried across and raised
where the batch was asked for, and a batch too few is an error.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from xla_b2t.data.groups import Batch


class DeviceBatch(NamedTuple):
    """One micro-step's trials on the core; the axes are those of `data.groups.Batch`."""

    features_BTC: torch.Tensor
    """bfloat16."""
    input_bins_B: torch.Tensor
    """int32; 0 in an empty slot."""
    labels_BL: torch.Tensor
    """int32, padded with 0."""
    label_lengths_B: torch.Tensor
    """int32."""
    required_steps_B: torch.Tensor
    """int32; the fewest steps that an alignment of the labels needs."""
    days_B: torch.Tensor
    """int32."""
    valid_B: torch.Tensor
    """bool; False in an empty slot."""


def as_tensors(batch: Batch) -> DeviceBatch:
    """The host batch as CPU tensors that share its memory."""
    return DeviceBatch(
        torch.from_numpy(batch.features_BTC).view(torch.bfloat16),
        torch.from_numpy(batch.input_bins_B),
        torch.from_numpy(batch.labels_BL),
        torch.from_numpy(batch.label_lengths_B),
        torch.from_numpy(batch.required_steps_B),
        torch.from_numpy(batch.days_B),
        torch.from_numpy(np.ascontiguousarray(batch.valid_B, dtype=bool)),
    )


class Feed:
    """Iterates over batches on the core; use it as a context manager, so that its threads end on every way out.

    Args:
        batches: host batches, read in a thread of the feed.
        num_batches: how many there must be.
        device: the core of this rank.
        ahead: batches kept ready on the host, and as many again on the core (`data.batch_plan.batches_ahead`).
    """

    def __init__(self, batches: Iterable[Batch], num_batches: int, device: torch.device, ahead: int = 2):
        self._batches = batches
        self._num_batches = num_batches
        self._error: BaseException | None = None
        self._closing = False
        self._loader = MpDeviceLoader(self._read(), device, loader_prefetch_size=ahead, device_prefetch_size=ahead)
        self._iterator: Iterator[list[torch.Tensor]] | None = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[DeviceBatch]:
        """Yields every batch once.

        Raises:
            Exception: what the reading thread raised, after the batches that it had read.
            RuntimeError: fewer batches came than were announced.
        """
        self._iterator = iter(self._loader)
        num_batches = 0
        for tensors in self._iterator:
            num_batches += 1
            yield DeviceBatch(*tensors)
        if self._error is not None:
            raise self._error
        if num_batches != self._num_batches:
            raise RuntimeError(f"the feed ended after {num_batches} of {self._num_batches} batches")

    def close(self) -> None:
        """Ends the threads; batches that were read ahead are dropped."""
        self._closing = True
        parallel = self._loader._parallel_loader
        if parallel is not None:
            parallel.close()
            self._loader._parallel_loader = None

    def _read(self) -> Iterator[list[torch.Tensor]]:
        try:
            for batch in self._batches:
                if self._closing:
                    return
                yield list(as_tensors(batch))
        except BaseException as error:  # raised again by __iter__, in the thread that asked
            self._error = error
