"""Proof that all ranks hold the same weights and follow the same schedule.

Ranks that differ in either train on without a word, each its own model, or wait for each other for ever. So both are
checked at the start and after every resume, and the weights again and again while the run lasts.
"""

import zlib
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch

from xla_b2t.data.schedule import Schedule
from xla_b2t.xla.world import World


def check_same_weights(weights: Mapping[str, torch.Tensor], world: World) -> None:
    """Compares a checksum of every weight over all ranks.

    Args:
        weights: this rank's, on the host, by name; of any dtype.
        world: all ranks must call this together.

    Raises:
        RuntimeError: names the first parameter that differs and the ranks that differ from rank 0.
    """
    checksums = {
        name: zlib.crc32(weight.contiguous().reshape(-1).view(torch.uint8).numpy()) for name, weight in weights.items()
    }
    _compare(checksums, world, "hold other weights than rank 0; the first that differs is")


def check_same_schedule(schedule: Schedule, world: World) -> None:
    """Compares over all ranks everything that a schedule follows from: the index of the groups, recipe, seed, batch.

    Args:
        schedule: this rank's.
        world: all ranks must call this together.

    Raises:
        RuntimeError: names the first thing that differs and the ranks that differ from rank 0.
    """
    parts = {f"index.{name}": value for name, value in vars(schedule.index).items() if isinstance(value, np.ndarray)}
    plain = [field.name for field in fields(schedule) if field.name != "index"]
    checksums = {name: zlib.crc32(np.ascontiguousarray(table)) for name, table in parts.items()}
    checksums |= {name: zlib.crc32(repr(getattr(schedule, name)).encode()) for name in plain}
    _compare(checksums, world, "follow another schedule than rank 0; the first that differs is")


def _compare(checksums: Mapping[str, int], world: World, how: str) -> None:
    names = list(checksums)
    # A checksum has 32 bits and a float32 counts to 2**24: it travels in halves.
    halves_RN2 = np.zeros((world.size, len(names), 2))
    for column, name in enumerate(names):
        halves_RN2[world.rank, column] = divmod(checksums[name], 1 << 16)
    all_RN2 = world.sum(halves_RN2.reshape(-1)).reshape(halves_RN2.shape)
    differs_RN = (all_RN2 != all_RN2[0]).any(axis=-1)
    if differs_RN.any():
        first = names[int(differs_RN.any(axis=0).argmax())]
        ranks = np.flatnonzero(differs_RN.any(axis=1)).tolist()
        raise RuntimeError(f"ranks {ranks} {how} {first}")
