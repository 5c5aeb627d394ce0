"""Restarts are counted, and a storm of them ends."""

import pytest

from xla_b2t.errors import UserError
from xla_b2t.training.restarts import FILE_NAME, count_restart, forget_restarts


def test_restarts_that_come_further_are_counted_and_go_on(tmp_path):
    assert [count_restart(tmp_path / "run", step, 1) for step in (0, 0, 10, 20, 30)] == [0, 1, 2, 3, 4]


def test_restarts_at_one_step_end_with_what_to_do(tmp_path):
    for _ in range(4):
        count_restart(tmp_path, 1200, 3)
    with pytest.raises(UserError) as caught:
        count_restart(tmp_path, 1200, 3)
    assert caught.value.what == "the run was started again 3 times in a row without coming further than step 1,200"
    assert caught.value.where == str(tmp_path / FILE_NAME)
    assert "--resume" in caught.value.fix and "crash" in caught.value.fix
    forget_restarts(tmp_path)
    assert count_restart(tmp_path, 1200, 3) == 0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"step": "x"}'])
def test_restarts_file_that_is_damaged_counts_as_none(tmp_path, content):
    (tmp_path / FILE_NAME).write_text(content)
    assert count_restart(tmp_path, 3, 1) == 0


def test_restarts_in_a_place_that_cannot_be_written_are_an_error(tmp_path):
    (tmp_path / "file").touch()
    forget_restarts(tmp_path / "file")
    with pytest.raises(UserError) as caught:
        count_restart(tmp_path / "file", 0, 1)
    assert caught.value.what.startswith("the run directory cannot be written: ")
    assert caught.value.where == str(tmp_path / "file" / FILE_NAME)
    assert caught.value.fix == "free some space there"
