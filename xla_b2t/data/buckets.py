"""Which lengths to pad to: the bucket edges that store the fewest bins for a given number of them.

In: lengths and how often each is stored. Out: ascending edges. Which trials share a group is left to `grouping`.
"""

from collections.abc import Sequence

import numpy as np

BIN_MULTIPLE = 16
"""Edges are multiples of this many bins; a TPU lays rows of bfloat16 out in tiles of 16."""

SLOT_MULTIPLE = 8
"""Label slots are multiples of this."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below a value."""
    return -(-value // multiple) * multiple


def best_edges(
    lengths_N: np.ndarray, most: int, longest: int, multiple: int = BIN_MULTIPLE
) -> list[tuple[tuple[int, ...], float]]:
    """For every number of edges the ones for which padding every length up to its edge stores the fewest bins.

    Exact, by dynamic programming over the distinct rounded lengths: best[k][j], the least cost of the shortest j
    lengths with k edges of which the last is length j, is the minimum over i < j of
    best[k-1][i] + length_j * (number of lengths i+1 to j).

    Args:
        lengths_N: integers (N,), bins, at least 1 each; one entry for each padded thing.
        most: edges, at least 1.
        longest: the last edge holds this length even when no entry is so long.
        multiple: every edge is a multiple of it.

    Returns:
        For 1 edge, 2, and so on, up to `most` or as many as there are distinct lengths: ascending edges in bins, of
        which the last holds `longest` and every length; and the share of the stored bins that is real.
    """
    lengths_N = np.asarray(lengths_N, np.int64)
    rounded_N = -(-lengths_N // multiple) * multiple
    last = max([round_up(longest, multiple), *rounded_N])
    sizes_M, counts_M = np.unique(np.append(rounded_N, last), return_counts=True)
    counts_M[-1] -= 1  # `last` was added as a candidate, not as something to store
    before_M = np.concatenate([[0], np.cumsum(counts_M)])
    num_sizes = len(sizes_M)
    num_edges = min(most, num_sizes)
    best_M = np.full(num_sizes + 1, np.inf)
    best_M[0] = 0
    came_from = np.zeros((num_edges + 1, num_sizes + 1), np.int64)
    found = []
    for k in range(1, num_edges + 1):
        following_M = np.full(num_sizes + 1, np.inf)
        for j in range(1, num_sizes + 1):
            costs = best_M[:j] + sizes_M[j - 1] * (before_M[j] - before_M[:j])
            came_from[k, j] = int(np.argmin(costs))
            following_M[j] = costs[came_from[k, j]]
        best_M = following_M
        edges, j = [], num_sizes
        for edge in range(k, 0, -1):
            edges.append(int(sizes_M[j - 1]))
            j = int(came_from[edge, j])
        found.append((tuple(reversed(edges)), float(lengths_N.sum() / best_M[num_sizes])))
    return found


def choose_edges(best: Sequence[tuple[tuple[int, ...], float]], num_buckets: int) -> tuple[int, ...]:
    """Of what `best_edges` gives, the at most `num_buckets` edges that store the fewest bins.

    A further edge never costs more, but the fewest edges of equal cost also compile the least.
    """
    return max(best[:num_buckets], key=lambda found: found[1])[0]


def bucket_of(length: int, edges: tuple[int, ...]) -> int:
    """The first bucket that holds a length. The last edge must hold it."""
    bucket = int(np.searchsorted(np.asarray(edges), length))
    assert bucket < len(edges), f"{length} bins do not fit the last bucket of {edges[-1]}"
    return bucket
