"""Orders of tasks and their peaks, counted by hand."""

from xla_b2t.memory.liveness import Task, greedy_order, lowest_peak, peak_of


def task(makes=(), uses=(), after=(), **kwargs):
    return Task(tuple(makes), frozenset(uses), frozenset(after), **kwargs)


def test_peak_of_a_chain_holds_what_is_read_and_what_is_made():
    chain = [task([0]), task([1], [0], [0]), task([2], [1], [1])]
    peak = peak_of(chain, [10, 30, 5], kept={2})
    assert (peak.num_bytes, peak.alive, peak.extra_bytes) == (40, (0, 1), 0)


def test_peak_of_a_buffer_that_is_read_late_lasts_until_then():
    tasks = [task([0]), task([1], [0], [0]), task([2], [1], [1]), task([3], [2, 0], [0, 2])]
    assert peak_of(tasks, [10, 20, 20, 1], kept={3}).num_bytes == 50


def test_peak_of_a_task_that_reuses_counts_one_place_for_both():
    tasks = [task([0]), task([1], [0], [0], reuses=True)]
    assert peak_of(tasks, [10, 10], kept={1}).num_bytes == 10
    assert peak_of(tasks, [10, 11], kept={1}).num_bytes == 21


def test_peak_of_a_task_with_a_body_counts_it_while_it_runs():
    tasks = [task([0], extra_bytes=7), task([1], [0], [0])]
    peak = peak_of(tasks, [10, 1], kept={1})
    assert (peak.num_bytes, peak.extra_bytes, peak.alive) == (17, 7, (0,))


def test_peak_of_nothing_is_nothing():
    assert lowest_peak([], [], set()).num_bytes == 0


def test_lowest_peak_is_that_of_the_better_order():
    # As traced all three large values are made before the first is read.
    tasks = [task([i]) for i in range(3)] + [task([3 + i], [i], [i]) for i in range(3)]
    sizes, kept = [100, 100, 100, 1, 1, 1], {3, 4, 5}
    assert peak_of(tasks, sizes, kept).num_bytes == 301
    assert lowest_peak(tasks, sizes, kept).num_bytes == 103


def test_greedy_order_runs_a_reader_once_it_frees_what_it_reads():
    # Task 2 makes more than it frees until task 1 has read the same buffer.
    tasks = [task([0]), task([1], [0], [0]), task([2], [0], [0]), task([3])]
    assert greedy_order(tasks, [50, 1, 20, 10], kept={1, 2, 3}) == [3, 0, 1, 2]
