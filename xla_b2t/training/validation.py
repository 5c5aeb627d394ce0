"""The error rate on the held-out split, the same on every rank and for any number of ranks.

In: a decoder and a reader of the split. Out: a `Validation`. When to validate is left to the loop.
"""

import math
from dataclasses import dataclass

import numpy as np

from xla_b2t.data.group_reader import GroupReader
from xla_b2t.errors import UserError
from xla_b2t.evaluation.decode import SplitDecoder
from xla_b2t.evaluation.per import DayScore, score
from xla_b2t.xla.world import World


@dataclass(frozen=True)
class Validation:
    """One decoding of the held-out split, over all ranks: error rates, and the mean loss of a trial in nats."""

    per: float
    per_by_day: dict[str, float]
    loss: float


def validate(decoder: SplitDecoder, reader: GroupReader, world: World, may_end: bool = False) -> Validation | None:
    """Decodes the split; all ranks must call this together.

    Args:
        decoder: of this rank.
        reader: of the split.
        world: this rank among the others.
        may_end: leave off where the run is asked to end meanwhile.

    Returns:
        None, on all ranks, where it was left off.

    Raises:
        UserError: a group that cannot be read, or a loss that is not finite.
    """
    sessions = reader.group_set.sessions
    counts = np.zeros(2 * len(sessions) + 1)
    loss = 0.0
    is_asked = False
    predictions = decoder.decode(reader)
    for prediction in predictions:
        # Before it has decoded the split once, ranks may have to agree on what a core has memory for.
        is_asked = may_end and decoder.has_decoded and world.stop_order.asked() is not None
        if is_asked:
            break
        day = sessions.index(prediction.session)
        result = score([(prediction.session, prediction.reference, prediction.decoded)])[prediction.session]
        counts[2 * day : 2 * day + 2] += result.errors, result.phonemes
        counts[-1] += 1
        loss += prediction.loss
    predictions.close()
    if any(world.votes(is_asked)):
        return None
    # Rates are taken after the reduction: a mean of the ranks' rates would depend on how trials are dealt.
    counts = world.sum(counts)
    trials = max(1.0, counts[-1])
    (mean_loss,) = world.sum(np.array([loss / trials]), exact=False)
    if not math.isfinite(mean_loss):
        raise UserError(
            f"the loss on the split {reader.index.split} is {mean_loss}",
            reader.index.where,
            "go on from the last checkpoint with --resume, or begin anew with a lower optimizer.rate.peak",
        )
    days = {
        session: DayScore(int(counts[2 * day]), int(counts[2 * day + 1]))
        for day, session in enumerate(sessions)
        if counts[2 * day + 1]
    }
    overall = sum(days.values(), DayScore())
    return Validation(overall.per, {session: day.per for session, day in days.items()}, float(mean_loss))
