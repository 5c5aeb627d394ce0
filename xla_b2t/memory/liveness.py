"""In which order kernels run, and what is in memory while each does.

In: tasks, which begin to use buffers and read others. Out: the moment at which most bytes are alive. Of two orders the
one with the lower peak counts, as it would for a compiler that keeps to its memory: as traced, and one in which the
next task is always the one that leaves least in memory.
"""

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A kernel as a scheduler sees it.

    Attributes:
        makes: buffers whose life it begins.
        uses: buffers that it reads, or writes into in place.
        waits_for: numbers of the tasks that must be done before it.
        extra_bytes: that it needs only while it runs: a loop's body.
        reuses: it may write into the place of what it reads last.
    """

    makes: tuple[int, ...]
    uses: frozenset[int]
    waits_for: frozenset[int]
    extra_bytes: int = 0
    reuses: bool = False


@dataclass(frozen=True)
class Peak:
    """The moment with most in memory.

    Attributes:
        num_bytes: of all buffers that are alive, and of what the task that runs needs besides.
        alive: the buffers.
        extra_bytes: what the task needs besides.
    """

    num_bytes: int
    alive: tuple[int, ...]
    extra_bytes: int


def lowest_peak(tasks: Sequence[Task], sizes: Sequence[int], kept: Set[int]) -> Peak:
    """The peak of the better of the two orders.

    Args:
        tasks: in traced order.
        sizes: bytes of each buffer.
        kept: buffers that are alive at the end.
    """
    orders = range(len(tasks)), greedy_order(tasks, sizes, kept)
    return min((peak_of([tasks[number] for number in order], sizes, kept) for order in orders), key=_num_bytes)


def _num_bytes(peak: Peak) -> int:
    return peak.num_bytes


def peak_of(ordered: Sequence[Task], sizes: Sequence[int], kept: Set[int]) -> Peak:
    """Walks an order; arguments as of `lowest_peak`."""
    last = {buffer: moment for moment, task in enumerate(ordered) for buffer in (*task.makes, *task.uses)}
    total, highest, at = 0, 0, -1
    for moment, task in enumerate(ordered):
        made = sum(sizes[buffer] for buffer in task.makes)
        ending = [buffer for buffer in task.uses if last[buffer] == moment and buffer not in kept]
        needed = total + made + task.extra_bytes - (_reused(task, ending, sizes) if task.reuses else 0)
        if needed > highest:
            highest, at = needed, moment
        ending += [buffer for buffer in task.makes if last[buffer] == moment and buffer not in kept]
        total += made - sum(sizes[buffer] for buffer in ending)
    born = {buffer: moment for moment, task in enumerate(ordered[: at + 1]) for buffer in task.makes}
    alive = sorted(buffer for buffer in born if last[buffer] >= at or buffer in kept)
    return Peak(highest, tuple(alive), ordered[at].extra_bytes if at >= 0 else 0)


def _reused(task: Task, ending: list[int], sizes: Sequence[int]) -> int:
    """Bytes of results that take the place of what is read for the last time and has their size."""
    free = [sizes[buffer] for buffer in ending]
    total = 0
    for buffer in task.makes:
        if sizes[buffer] in free:
            free.remove(sizes[buffer])
            total += sizes[buffer]
    return total


def greedy_order(tasks: Sequence[Task], sizes: Sequence[int], kept: Set[int]) -> list[int]:
    """Numbers of the tasks in an order in which each leaves least in memory; of equals the first traced comes first."""
    readers: list[list[int]] = [[] for _ in sizes]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for buffer in task.uses:
            readers[buffer].append(number)
        for other in task.waits_for:
            followers[other].append(number)
    unread = [len(numbers) for numbers in readers]
    waiting = [len(task.waits_for) for task in tasks]
    order: list[int] = []
    done = [False] * len(tasks)

    def growth(number: int) -> int:
        made = sum(sizes[buffer] for buffer in tasks[number].makes if unread[buffer] or buffer in kept)
        return made - sum(sizes[buffer] for buffer in tasks[number].uses if unread[buffer] == 1 and buffer not in kept)

    ready = [(growth(number), number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        if done[number]:
            continue
        done[number] = True
        order.append(number)
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (growth(follower), follower))
        for buffer in tasks[number].uses:
            unread[buffer] -= 1
            if unread[buffer] == 1:
                # Whoever reads it last now frees it: an entry with the new figure comes before the old one.
                for reader in readers[buffer]:
                    if not done[reader] and not waiting[reader]:
                        heapq.heappush(ready, (growth(reader), reader))
    assert len(order) == len(tasks), "a kernel waits for itself"
    return order
