import os
import signal
import time

import pytest

from xla_b2t.data.workers import Workers
from xla_b2t.errors import UserError


def double(task, at):
    at(f"file {task}", 0)
    at(f"file {task}", 10)
    return 2 * task


def die(task, at):
    at(f"file {task}", 0)
    if task == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    return task


def be_killed(task, at):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(task, at):
    raise UserError("what", "where", "fix")


def fail(task, at):
    at("the file", 0)
    return 1 / 0


@pytest.mark.parametrize("number", [0, 2])
def test_workers_give_every_result_and_what_was_read(number):
    said = []
    with Workers(number) as workers:
        for _ in range(2):  # the processes are there still
            results = dict(workers.run(double, range(5), lambda *at: said.append(at)))
            assert results == {place: 2 * place for place in range(5)}
    assert sum(read for _, read in said) == 2 * 5 * 10
    assert {path for path, _ in said} == {f"file {place}" for place in range(5)}


def test_worker_that_dies_is_a_user_error_that_names_the_file():
    with Workers(1) as workers, pytest.raises(UserError) as raised:
        list(workers.run(die, range(5), lambda *_: None))
    assert raised.value.what == "a worker died (SIGSEGV)"
    assert raised.value.where == "file 2"
    assert raised.value.fix == "copy or download the file again, or move its session away"


def test_worker_that_is_killed_points_to_memory():
    with Workers(1) as workers, pytest.raises(UserError) as raised:
        list(workers.run(be_killed, [1], lambda *_: None))
    assert raised.value.what == "a worker died (SIGKILL)"
    assert raised.value.where == "before its first file"
    assert "memory" in raised.value.fix and "--workers" in raised.value.fix


def test_worker_passes_a_user_error_on():
    with Workers(1) as workers, pytest.raises(UserError) as raised:
        list(workers.run(refuse, [1], lambda *_: None))
    assert raised.value.args == ("what", "where", "fix")


def test_worker_that_fails_gives_its_traceback():
    with Workers(1) as workers, pytest.raises(RuntimeError, match="ZeroDivisionError") as raised:
        list(workers.run(fail, [1], lambda *_: None))
    assert "at the file" in str(raised.value)


def test_workers_are_gone_at_the_end():
    with Workers(2) as workers:
        list(workers.run(double, range(2), lambda *_: None))
        processes = list(workers._processes.values())
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def hang(task, at):
    at("the file", 0)
    time.sleep(600)


def test_worker_that_never_ends_is_a_user_error_that_names_the_file():
    with Workers(1, patience_s=0.5) as workers, pytest.raises(UserError) as raised:
        list(workers.run(hang, [1], lambda *_: None))
    assert raised.value.what == "a worker has been at one trial for 0.5 s"
    assert raised.value.where in ("the file", "before its first file")  # it takes a moment to start
    assert "damaged" in raised.value.fix and "move its session away" in raised.value.fix
