"""Decodes a split on all ranks: every trial exactly once, whatever the number of cores.

In: a model on the core and the index of a split. Out: this rank's `Prediction`s, trial by trial; adding up is left to
the caller. The evaluation step has one graph for each bucket. Where a core has no memory for a batch, all ranks go on
with a part of it at a time, which changes no number.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import batch_at_most, batches_ahead, cut_batch, longest_batch_bytes, smaller_batch
from xla_b2t.data.group_reader import GroupReader
from xla_b2t.data.groups import Batch
from xla_b2t.data.schedule import EvaluationStep, plan_evaluation
from xla_b2t.errors import UserError
from xla_b2t.evaluation.greedy import collapse
from xla_b2t.models.augment import smooth
from xla_b2t.models.ctc import ctc_loss
from xla_b2t.models.policy import DTYPES
from xla_b2t.models.protocol import checked, head_logits
from xla_b2t.xla.attempt import OutOfHbm, attempt, who
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


@dataclass(frozen=True)
class DecodingFallback:
    """Why ranks decode fewer trials at once.

    Attributes:
        input_bins: of the bucket that was refused.
        before, after: trials that a rank decodes at once.
        ranks: those that ran out of HBM.
        text: what this rank was told of it; "" where it was not refused.
    """

    input_bins: int
    before: int
    after: int
    ranks: tuple[int, ...]
    text: str

    def in_words(self) -> str:
        """A line for the user."""
        return (
            f"out of HBM when decoding {self.before} trials of {self.input_bins} bins at once ({who(self.ranks)}): "
            f"going on with {self.after}; the results do not depend on it"
        )


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
        most_trials: trials that a rank decodes at once at most; None leaves that to `groups_per_core`.
        on_fallback: told on every rank when it must be fewer.

    Attributes:
        batch_size: trials that a rank decodes at once.
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
        most_trials: int | None = None,
        on_fallback: "Callable[[DecodingFallback], None] | None" = None,
    ):
        self._model = model
        self._num_classes = num_classes
        self._config = config
        self._world = world
        self._guard = guard
        self._groups_per_core = groups_per_core
        self._head = head
        self._most_trials = most_trials
        self._on_fallback = on_fallback
        self.batch_size = 0  # of a split's first step, when its groups are known
        self.has_decoded = False

    def decode(self, reader: GroupReader) -> Generator[Prediction, None, None]:
        """Yields this rank's share of a split; all ranks must be asked for it together.

        Raises:
            UserError: a group that cannot be read, a step that compiled again or left the core, a head that the model
                does not have.
        """
        steps = plan_evaluation(reader.index, self._world.size, self._groups_per_core)
        if not self.batch_size:
            slot = self._groups_per_core * reader.group_set.group_size
            self.batch_size = batch_at_most(slot, self._most_trials or slot)
        self._model.eval()
        done = 0
        while done < len(steps):
            done += yield from self._decode(reader, steps[done:])
        self.has_decoded = True

    def _decode(self, reader: GroupReader, steps: list[EvaluationStep]) -> Generator[Prediction, None, int]:
        """Decodes steps; returns how many, which is less than all when a smaller batch must go on with the rest."""
        mine = [(step.bucket, step.groups_by_rank[self._world.rank]) for step in steps]
        slot = self._groups_per_core * reader.group_set.group_size
        pieces = slot // self.batch_size
        hosts: list[Batch] = []

        def read() -> Iterator[Batch]:
            for bucket, groups in mine:
                for piece in cut_batch(reader.read(groups, bucket), self.batch_size):
                    hosts.append(piece)
                    yield hosts[-1]

        group_set = reader.group_set
        longest_bytes = longest_batch_bytes(self.batch_size, group_set.buckets, group_set.num_features)
        ahead = batches_ahead(self._config.data.prefetch_mb, longest_bytes)
        done, refused = len(steps), OutOfHbm([], "")
        started: list[torch.Tensor] = []
        with Feed(read(), len(mine) * pieces, device(), ahead) as feed, torch.no_grad():
            for number, batch in enumerate(feed):
                before = started
                try:
                    started = self._start(batch, mine[number // pieces][0])
                except OutOfHbm as error:
                    done, refused = number // pieces, error.with_traceback(None)  # its frames hold dead tensors
                    break
                if before:  # read while the core is busy with the next
                    yield from self._predictions(reader, hosts.pop(0), to_host(before))
            if started:
                yield from self._predictions(reader, hosts.pop(0), to_host(started))
        if done < len(steps):
            self._fall_back(reader, mine[done][0], refused)
        return done

    def _start(self, batch: DeviceBatch, bucket: int) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []

        def step() -> torch.Tensor:
            with self._guard.watch("evaluate", bucket, f"features {tuple(batch.features_BTC.shape)}"):
                results.extend(decoding_step(self._model, batch, self._num_classes, self._config, self._head))
                sync()
            return results[-1]

        if self._guard.knows("evaluate", bucket):
            step()
        else:
            attempt(self._world, [], step, reduces=False)
        return results

    def _fall_back(self, reader: GroupReader, bucket: int, refused: OutOfHbm) -> None:
        bins = reader.group_set.buckets[bucket].input_bins
        smaller = smaller_batch(self.batch_size)
        if smaller is None:
            said = f": {refused.text}" if refused.text else ""
            raise UserError(
                f"out of HBM when decoding a single trial of {bins} bins, on {who(refused.ranks)}{said}",
                f"{reader.index.where}: bucket of {bins} bins",
                "see what takes the memory with xla_b2t plan-memory, and make the model smaller",
            )
        gc.collect()  # what a refused step left behind would be a part of the next graph
        before, self.batch_size = self.batch_size, smaller
        self._guard.forget("evaluate")
        if self._on_fallback:
            self._on_fallback(DecodingFallback(bins, before, smaller, tuple(refused.ranks), refused.text))

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
