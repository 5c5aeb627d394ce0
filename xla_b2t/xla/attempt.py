"""Running what a core may have no memory for, so that all ranks know alike whether it had.

In: graphs to trace and start. Out: nothing where every rank ran them; the same `OutOfHbm` on every rank where one was
refused, with the core's tensors as they were. What to do about it is left to the caller.

Ranks tell each other on the host: a core that waits in a reduction for one that was refused waits for ever, and nothing
can call it back. So where the graph itself reduces, they tell twice. First when it is compiled and started: compilers
that are given the same graph say the same, so it is refused everywhere or nowhere, and where it is not, the ranks that
went ahead must end. Then when it has run.
"""

import traceback
from collections.abc import Callable, Sequence

import torch

from xla_b2t.errors import UserError
from xla_b2t.xla.device import to_host
from xla_b2t.xla.kept import Kept
from xla_b2t.xla.out_of_memory import Memory, exhausted, in_short
from xla_b2t.xla.world import World

PATIENCE_S = 60.0
"""For ranks whose core has run what this one was refused: they say so at once, or wait in a reduction and never do."""

_RAN, _REFUSED, _LOST = range(3)


class OutOfHbm(Exception):
    """A graph was refused for want of HBM on some rank; raised on all ranks alike, with nothing changed.

    Attributes:
        ranks: those that were refused.
        text: what this rank was told, in short; "" where it was not refused.
    """

    def __init__(self, ranks: list[int], text: str):
        super().__init__(ranks, text)
        self.ranks = ranks
        self.text = text


def who(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def attempt(
    world: World, state: list[torch.Tensor], run: Callable[[], torch.Tensor], reduces: bool, fix: str = ""
) -> None:
    """Runs graphs to their end; all ranks must call it together.

    Args:
        world: this rank among the others.
        state: what `run` changes on the core.
        run: traces and starts the graphs; returns a small result of the last of them, to wait for.
        reduces: whether the graphs hold a reduction over several ranks.
        fix: what to tell the user where nothing can be undone.

    Raises:
        OutOfHbm: on every rank.
        UserError: a rank was refused, and the others can neither go on nor back.
        Exception: anything else that `run` raised, on this rank alone.
    """
    kept = Kept(state)
    text = ""
    result: torch.Tensor | None = None
    try:
        result = run()
    except Exception as error:
        text = _refusal(error)
    if reduces:
        _agree(world.votes(_REFUSED if text else _RAN), text, kept, fix)
    if result is not None:
        try:
            to_host([result])
        except Exception as error:
            text = _refusal(error)
        result = None
    vote = _RAN if not text else _REFUSED if kept.is_there() else _LOST
    try:
        votes = world.votes(vote, PATIENCE_S if reduces and text else None)
    except TimeoutError:
        raise _ahead(text, fix) from None
    _agree(votes, text, kept, fix, may_differ=not reduces)


def _refusal(error: Exception) -> str:
    """What was said of HBM; anything else is raised again. Lets go of the tensors that the failed calls hold."""
    if exhausted(error) is not Memory.HBM:
        raise error
    text = in_short(error)
    traceback.clear_frames(error.__traceback__)
    return text


def _agree(votes: list[int], text: str, kept: Kept, fix: str, may_differ: bool = False) -> None:
    ranks = [rank for rank, vote in enumerate(votes) if vote != _RAN]
    if not ranks:
        return
    if _LOST in votes:
        raise UserError(
            f"out of HBM while a step ran (rank {votes.index(_LOST)}), and the weights that it was given are gone"
            + (f": {text}" if text else ""),
            "the core's memory",
            fix,
        )
    if len(ranks) < len(votes) and not may_differ:
        raise _ahead(text or f"rank {ranks[0]} was refused", fix)
    kept.put_back()
    raise OutOfHbm(ranks, text)


def _ahead(text: str, fix: str) -> UserError:
    return UserError(
        f"out of HBM on some ranks alone, while the others wait for them inside the graph: {text}",
        "the core's memory",
        fix,
    )
