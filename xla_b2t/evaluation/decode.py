"""Decodes a split on all ranks: every trial exactly once, whatever the number of cores.

In: a model on the core and the index of a split. Out: this rank's `Prediction`s, trial by trial; adding up is left to
the caller. The evaluation step has one graph for each bucket.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from xla_b2t.config import Config
from xla_b2t.data.groups import Batch, GroupReader
from xla_b2t.data.schedule import plan_evaluation
from xla_b2t.evaluation.greedy import collapse
from xla_b2t.models.augment import smooth
from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.policy import DTYPES
from xla_b2t.models.protocol import checked, head_logits
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import device, sync, to_host
from xla_b2t.xla.feed import DeviceBatch, Feed
from xla_b2t.xla.world import World


@dataclass(frozen=True)
class Prediction:
    """One decoded trial.

    Attributes:
        trial: `session/split/trial`.
        session: the day it is of.
        decoded: class ids, without blanks and repeats.
        reference: class ids; None where the split has no labels.
        loss: CTC loss in nats; None where the split has no labels.
    """

    trial: str
    session: str
    decoded: tuple[int, ...]
    reference: tuple[int, ...] | None
    loss: float | None


class SplitDecoder:
    """Decodes splits with one model and one batch size.

    Args:
        model: on the core.
        num_classes: K of its logits.
        config: of the run: dtype, smoothing, prefetching.
        world: this rank among the others.
        guard: watches what compiles.
        groups_per_core: groups that a rank decodes at once.
        head: the auxiliary head to decode with; "" decodes with the main one.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        config: Config,
        world: World,
        guard: CompileGuard,
        groups_per_core: int,
        head: str = "",
    ):
        self._model = model
        self._num_classes = num_classes
        self._config = config
        self._world = world
        self._guard = guard
        self._groups_per_core = groups_per_core
        self._head = head

    def decode(self, reader: GroupReader) -> Iterator[Prediction]:
        """Yields this rank's share of a split; all ranks must be asked for it together.

        Raises:
            UserError: a group that cannot be read, a step that compiled again or left the core, a head that the model
                does not have.
        """
        steps = plan_evaluation(reader.index, self._world.size, self._groups_per_core)
        mine = [(step.bucket, step.groups_by_rank[self._world.rank]) for step in steps]
        hosts: list[Batch] = []

        def read() -> Iterator[Batch]:
            for bucket, groups in mine:
                hosts.append(reader.read(groups, bucket))
                yield hosts[-1]

        self._model.eval()
        with Feed(read(), len(mine), device(), self._config.data.prefetch_batches) as feed, torch.no_grad():
            started: list[torch.Tensor] = []
            for (bucket, _), batch in zip(mine, feed, strict=True):
                before = started
                with self._guard.watch("evaluate", bucket, f"features {tuple(batch.features_BTC.shape)}"):
                    started = decoding_step(self._model, batch, self._num_classes, self._config, self._head)
                    sync()
                if before:  # read while the core is busy with the next
                    yield from self._predictions(reader, hosts.pop(0), to_host(before))
            if started:
                yield from self._predictions(reader, hosts.pop(0), to_host(started))

    def _predictions(self, reader: GroupReader, batch: Batch, results: list[torch.Tensor]) -> Iterator[Prediction]:
        ids_BP, steps_B, loss_B = (result.numpy() for result in results)
        labelled = reader.index.labelled
        for row, decoded in enumerate(collapse(ids_BP, steps_B)):
            if batch.valid_B[row]:
                yield Prediction(
                    trial=batch.trial_ids[row],
                    session=reader.group_set.sessions[batch.days_B[row]],
                    decoded=tuple(decoded),
                    reference=tuple(batch.labels_BL[row, : batch.label_lengths_B[row]].tolist()) if labelled else None,
                    loss=float(loss_B[row]) if labelled else None,
                )


def decoding_step(
    model: nn.Module, batch: DeviceBatch, num_classes: int, config: Config, head: str = ""
) -> list[torch.Tensor]:
    """What the core computes for a batch: the most likely class at each step, the number of steps, the CTC loss.

    Args:
        model: on the core, in evaluation mode.
        batch: on the core.
        num_classes: K of its logits.
        config: of the run.
        head: the auxiliary head to decode with; "" is the main one.

    Returns:
        ids_BP, steps_B, int32, and loss_B, float32 (without meaning where there are no labels).
    """
    features_BTC = smooth(batch.features_BTC.to(DTYPES[config.model.dtype]), config.augment.smooth_sigma_bins)
    output = checked(model(features_BTC, batch.input_bins_B, batch.days_B), features_BTC, num_classes, model)
    logits_BPK = head_logits(output, head, model)
    loss_B = ctc_loss(logits_BPK, batch.labels_BL, output.steps_B, batch.label_lengths_B)
    return [logits_BPK.argmax(-1).to(torch.int32), output.steps_B.to(torch.int32), loss_B]
