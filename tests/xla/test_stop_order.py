"""All ranks end before the same update, whoever asks and whenever they look."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from xla_b2t.xla.stop_order import StopOrder
from xla_b2t.xla.world import Alone


def test_stop_order_that_nobody_gave_ends_nothing(tmp_path):
    order = StopOrder(tmp_path)
    assert order.asked() is None
    assert not any(order.ends_before(step, rank, step) for step in range(3) for rank in range(2))


def test_stop_order_without_a_folder_cannot_be_given():
    assert StopOrder("").asked() is None
    assert not StopOrder("").ends_before(0, 0, 0)


def test_stop_order_is_decided_by_rank_0_alone_and_once(tmp_path):
    order = StopOrder(tmp_path)
    order.ask(signal.SIGTERM)
    order.ask(signal.SIGINT)
    assert order.asked() == signal.SIGTERM
    assert not order.ends_before(5, 1, 6), "nothing is decided yet"
    assert not order.ends_before(4, 0, 6)
    assert [order.ends_before(step, 1, step + 1) for step in (5, 6, 7)] == [False, True, True]
    assert [order.ends_before(step, 0, step + 1) for step in (5, 6)] == [False, True]


def test_ranks_that_meet_in_every_update_end_before_the_same_one(tmp_path):
    """As threads that meet at the end of every update, as gloo's ranks do; asked at any moment."""
    for turn in range(20):
        (folder := tmp_path / str(turn)).mkdir()
        barrier, ended = threading.Barrier(3), {}

        def rank(number, folder=folder, barrier=barrier, ended=ended):
            order, step = StopOrder(folder), 0
            while not order.ends_before(step, number, step + 1):
                barrier.wait(20)
                step += 1
            ended[number] = step

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * turn)
        StopOrder(folder).ask(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        assert sorted(ended) == [0, 1, 2]
        assert len(set(ended.values())) == 1


def test_rank_alone_meets_nobody():
    assert Alone("cpu").next_meeting(7, 20) == 7


WAITS = """
import sys, time
from xla_b2t.xla.stop_order import StopOrder, ask_on_sigterm
ask_on_sigterm(StopOrder(sys.argv[1]), is_in_pool=bool(sys.argv[2]))
print("ready", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    sum(range(10**7))  # holds the main thread, as a compiler does
"""


@pytest.fixture
def waiting(tmp_path):
    """Starts a process that waits for SIGTERM, in a pool of this one or not."""
    processes = []

    def start(is_in_pool):
        command = [sys.executable, "-c", WAITS, tmp_path, "yes" if is_in_pool else ""]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[0].stdout.readline() == "ready\n"
        return processes[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_sigterm_asks_at_once_and_does_not_end_the_process(tmp_path, waiting):
    process = waiting(is_in_pool=False)
    process.terminate()
    until = time.monotonic() + 20
    while (asked := StopOrder(tmp_path).asked()) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert asked == signal.SIGTERM
    assert process.poll() is None


def test_sigterm_of_the_pool_that_a_process_belongs_to_ends_it(tmp_path, waiting):
    process = waiting(is_in_pool=True)
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    assert StopOrder(tmp_path).asked() is None


def test_sigterm_of_others_asks_a_process_of_a_pool_too(tmp_path, waiting):
    process = waiting(is_in_pool=True)
    subprocess.run([sys.executable, "-c", f"import os; os.kill({process.pid}, 15)"], check=True)
    until = time.monotonic() + 20
    while (asked := StopOrder(tmp_path).asked()) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert asked == signal.SIGTERM
    assert process.poll() is None
