"""The largest batch that fits, found by asking as seldom as possible.

In: a function that says what a batch needs, which may take a minute, and a first guess. Out: the largest batch whose
need stays within a limit. What is needed grows with the batch, nearly along a line, so the next batch to ask about lies
where the line through the two nearest answers meets the limit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Need = Callable[[int], int | None]
"""Bytes that a batch of so many trials needs; None where the compiler refused and did not say."""


@dataclass(frozen=True)
class Search:
    """What came of a search.

    Attributes:
        batch_size: the largest that fits, a multiple of the step; 0 when none does.
        is_bounded: the next larger one was asked about and does not fit; False where `most` ended the search.
    """

    batch_size: int
    is_bounded: bool


def largest(
    need: Need,
    limit_bytes: int,
    step: int,
    guess: int,
    per_trial_bytes: float,
    most: int,
) -> Search:
    """Searches among the multiples of `step`.

    Args:
        need: asked once for a batch at most.
        limit_bytes: what a batch may need.
        step: trials from one candidate to the next, at least 1.
        guess: where to begin; it is brought to a multiple of the step, from `step` to `most`.
        per_trial_bytes: what a trial more needs, by arithmetic: the slope of the line while there is one answer.
        most: the largest worth asking about, a multiple of the step.
    """
    answers: dict[int, int | None] = {}
    fitting, refused = 0, most + step
    candidate = _within(guess, fitting, refused, step)
    while refused - fitting > step:
        answers[candidate] = need(candidate)
        if _fits(answers[candidate], limit_bytes):
            fitting = candidate
        else:
            refused = candidate
        aim = _where_line_meets(answers, fitting, refused, limit_bytes, per_trial_bytes)
        candidate = _within((fitting + refused) // 2 if aim is None else aim, fitting, refused, step)
    return Search(fitting, refused <= most)


def _fits(needed: int | None, limit_bytes: int) -> bool:
    return needed is not None and needed <= limit_bytes


def _within(aim: int, fitting: int, refused: int, step: int) -> int:
    """The multiple of the step below the aim, strictly between the two bounds."""
    return max(fitting + step, min(aim // step * step, refused - step))


def _where_line_meets(
    answers: Mapping[int, int | None], fitting: int, refused: int, limit_bytes: int, per_trial_bytes: float
) -> int | None:
    """The batch at which the line through the two answers nearest to the gap reaches the limit; None without a line."""
    points = [(batch, needed) for batch, needed in answers.items() if needed is not None]
    if not points or (refused in answers and answers[refused] is None):
        return None
    points.sort(key=lambda point: min(abs(point[0] - fitting), abs(point[0] - refused)))
    batch, needed = points[0]
    slope = per_trial_bytes
    if len(points) > 1:
        slope = (needed - points[1][1]) / (batch - points[1][0])
    return int(batch + (limit_bytes - needed) / slope) if slope > 0 else None
