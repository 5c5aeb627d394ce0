from itertools import combinations

import numpy as np
import pytest

from xla_b2t.data.buckets import best_edges, bucket_of, choose_edges, round_up


def stored_bins(lengths, edges):
    return sum(edges[bucket_of(length, edges)] for length in lengths)


def cheapest_by_trying_all(lengths, num_buckets, last, multiple):
    sizes = sorted({round_up(length, multiple) for length in lengths} | {last})
    choices = (
        (*chosen, last)
        for count in range(num_buckets)
        for chosen in combinations([s for s in sizes if s < last], count)
    )
    return min(stored_bins(lengths, edges) for edges in choices)


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4])
def test_choose_edges_small_cases_store_as_little_as_any_choice(num_buckets):
    generator = np.random.default_rng(num_buckets)
    for _ in range(30):
        lengths = generator.integers(1, 150, generator.integers(1, 12))
        longest = int(max(lengths.max(), generator.integers(1, 200)))
        edges = choose_edges(best_edges(lengths, num_buckets, longest, multiple=8), num_buckets)
        assert len(edges) <= num_buckets
        assert list(edges) == sorted(set(edges))
        assert edges[-1] == round_up(longest, 8)
        assert all(edge % 8 == 0 for edge in edges)
        assert stored_bins(lengths, edges) == cheapest_by_trying_all(lengths, num_buckets, edges[-1], 8)


def test_choose_edges_equal_lengths_make_one_bucket():
    assert choose_edges(best_edges(np.full(100, 33), 8, 33), 8) == (48,)


def test_choose_edges_longest_beyond_every_length_gets_an_edge_of_its_own():
    assert choose_edges(best_edges(np.array([16, 16, 16]), 2, 160), 2) == (16, 160)
    assert choose_edges(best_edges(np.array([16, 16, 16]), 1, 160), 1) == (160,)


@pytest.mark.parametrize(("length", "bucket"), [(1, 0), (16, 0), (17, 1), (32, 1), (64, 2)])
def test_bucket_of_takes_the_first_that_holds(length, bucket):
    assert bucket_of(length, (16, 32, 64)) == bucket


def test_best_edges_tell_the_share_of_real_bins_for_every_number_of_them():
    found = best_edges(np.array([16, 16, 32, 64]), 8, 64)
    assert found == [
        ((64,), 128 / 256),
        ((16, 64), 128 / 160),
        ((16, 32, 64), 1.0),
    ]
    assert best_edges(np.array([10]), 3, 10) == [((16,), 10 / 16)]
