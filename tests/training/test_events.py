import errno
import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xla_b2t.errors import UserError
from xla_b2t.training.events import EventLog


def lines(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def scalars(folder):
    board = EventAccumulator(str(folder)).Reload()
    return {tag: [(point.step, point.value) for point in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_event_log_writes_a_line_at_once_with_time_kind_and_step(tmp_path):
    with EventLog(tmp_path / "run", clock=lambda: 12.3456) as log:
        log.write("train", 20, loss=1.5, bucket=[3, 4], note="warm")
        (line,) = lines(tmp_path / "run")
    assert line == {"time": 12.346, "kind": "train", "step": 20, "loss": 1.5, "bucket": [3, 4], "note": "warm"}


def test_event_log_numbers_become_scalars(tmp_path):
    with EventLog(tmp_path) as log:
        log.write("train", 10, loss=2.0, done=True, name="x")
        log.write("train", 20, loss=1.0)
        log.write("val", 20, per=0.5, per_day={"t15.2023.08.11": 0.25})
    assert scalars(tmp_path) == {
        "train/loss": [(10, 2.0), (20, 1.0)],
        "val/per": [(20, 0.5)],
        "val/per_day/t15.2023.08.11": [(20, 0.25)],
    }


def test_event_log_numpy_values_and_what_json_cannot_say(tmp_path):
    with EventLog(tmp_path) as log:
        log.write("train", 1, loss=np.float32(0.5), norm=math.nan, worst=-math.inf, by_day={"a": np.int64(3)})
    (line,) = lines(tmp_path)
    assert (line["loss"], line["norm"], line["worst"], line["by_day"]) == (0.5, "nan", "-inf", {"a": 3})
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5)], "train/by_day/a": [(1, 3.0)]}


def test_event_log_resumed_continues_and_hides_what_was_lost(tmp_path):
    with EventLog(tmp_path) as log:
        for step in (10, 20, 30):
            log.write("train", step, loss=float(step))
    with EventLog(tmp_path, first_step=20) as log:
        log.write("train", 30, loss=99.0)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 30]
    assert scalars(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0), (30, 99.0)]}


def test_event_log_after_a_killed_writer_keeps_lines_apart(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "train", "st')
    with EventLog(tmp_path) as log:
        log.write("train", 1, loss=1.0)
    broken, whole = (tmp_path / "events.jsonl").read_text().splitlines()
    assert broken == '{"kind": "train", "st'
    assert json.loads(whole)["step"] == 1


def test_event_log_where_no_folder_can_be_is_a_user_error(tmp_path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(UserError) as caught:
        EventLog(tmp_path / "run")
    assert caught.value.what == "the event log cannot be written: File exists"
    assert caught.value.where == str(tmp_path / "run/events.jsonl")
    assert caught.value.fix == "free space there, or give another run.dir"


def test_event_log_on_a_full_disk_is_a_user_error(tmp_path, monkeypatch):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with EventLog(tmp_path) as log:
        real = log._file
        monkeypatch.setattr(log, "_file", Full())
        with pytest.raises(UserError) as caught:
            log.write("train", 1, loss=1.0)
        monkeypatch.setattr(log, "_file", real)
    assert caught.value.what == "the event log cannot be written: No space left on device"
    assert (caught.value.where, caught.value.fix) == (
        str(tmp_path / "events.jsonl"),
        "free space there, or give another run.dir",
    )


def test_event_log_left_by_a_full_disk_keeps_the_user_error(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    message = "the event log cannot be written: No space left on device"
    with pytest.raises(UserError, match=message), EventLog(tmp_path) as log:
        log.write("train", 1, loss=1.0)


def test_event_log_left_by_another_error_on_a_full_disk_keeps_that_error(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")

    def fail_with_unflushed_bytes():
        with EventLog(tmp_path) as log:
            log._file.write(b"not flushed yet")
            raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        fail_with_unflushed_bytes()


def test_event_log_closed_on_a_full_disk_is_a_user_error(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError) as caught, EventLog(tmp_path) as log:
        log._file.write(b"not flushed yet")
    assert caught.value.args == (
        "the event log cannot be written: No space left on device",
        str(tmp_path / "events.jsonl"),
        "free space there, or give another run.dir",
    )
