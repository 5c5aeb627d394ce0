"""The phoneme error rate, per day and overall.

In: sessions with reference and decoded phonemes. Out: counts of errors and phonemes, which add up over trials, days and
ranks; a rate is taken only at the end. The rate is the sum of edit distances over the sum of reference phonemes,
silence included, as the published baseline counts it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein


@dataclass(frozen=True)
class DayScore:
    """Errors (substitutions, insertions and deletions) and reference phonemes."""

    errors: int = 0
    phonemes: int = 0

    def __add__(self, other: "DayScore") -> "DayScore":
        return DayScore(self.errors + other.errors, self.phonemes + other.phonemes)

    @property
    def per(self) -> float:
        """Phoneme error rate, 0 for a perfect decoder; insertions can take it above 1. No phonemes count as one."""
        return self.errors / max(self.phonemes, 1)


def score(pairs: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> dict[str, DayScore]:
    """Scores trials.

    Args:
        pairs: (session, reference class ids, decoded class ids) of every trial.

    Returns:
        session -> its score, sorted by session.
    """
    by_day: dict[str, DayScore] = {}
    for session, reference, decoded in pairs:
        trial = DayScore(Levenshtein.distance(reference, decoded), len(reference))
        by_day[session] = by_day.get(session, DayScore()) + trial
    return dict(sorted(by_day.items()))


def total(by_day: Mapping[str, DayScore]) -> DayScore:
    """The score over all days."""
    return sum(by_day.values(), DayScore())
