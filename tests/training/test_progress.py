import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest

from xla_b2t.training.progress import LINE_EVERY_S, Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal:
    """A pseudo terminal: what is written to `stream` can be read as text."""

    def __init__(self, columns):
        self.main, worker = pty.openpty()
        fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(worker, "w", encoding="utf-8")
        self._parts = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        try:
            while part := os.read(self.main, 65536):
                self._parts.append(part)
        except OSError:
            return  # the other end was closed

    def text(self):
        self.stream.close()
        self._reader.join(timeout=5)
        os.close(self.main)
        return b"".join(self._parts).decode()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    return Terminal


def run(progress, clock, steps=100):
    progress.start(steps)
    for step in range(1, steps + 1):
        clock.now += 1.0
        progress.update(step, 1.0 / step, 500.0)
        if step % 50 == 0:
            progress.validated(step, 10.0 / step)


def test_progress_without_a_terminal_is_a_calm_plain_log():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, clock) as progress:
        run(progress, clock)
        progress.message("checkpoint saved")
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "train 100 updates"
    assert lines[1].startswith("train   1/100   1 %   loss 1.000")
    assert "step 50   val PER 20.0 %   best so far" in lines
    assert lines[-2] == "checkpoint saved"
    assert lines[-1] == "done 100/100 100 %   loss 0.010   val PER 10.0 %   500 trials/s   1:40 so far"
    # One line every ten of the hundred seconds, two validations, the start, the message, the end.
    assert len(lines) == 100 / LINE_EVERY_S + 5


def test_progress_resumed_says_so():
    stream = io.StringIO()
    Progress(stream, Clock()).start(2000, 1500)
    assert stream.getvalue() == "train 2,000 updates, 1,500 of them done\n"


def test_progress_validation_worse_than_the_best_names_the_best():
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    progress.start(10)
    progress.validated(1, 0.25)
    progress.validated(2, 0.5)
    assert stream.getvalue().splitlines()[-1] == "step 2   val PER 50.0 %   best 25.0 %"


def test_progress_in_a_terminal_draws_a_bar_and_restores_the_cursor(terminal):
    tty, clock = terminal(100), Clock()
    with Progress(tty.stream, clock) as progress:
        run(progress, clock)
        progress.message("checkpoint saved")
    text = tty.text()
    assert "━" in text
    assert "100/100 100 %" in text
    assert "step 100   val PER 10.0 %   best so far" in text
    assert "checkpoint saved" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor stayed hidden"


def test_progress_in_a_terminal_is_restored_after_an_exception(terminal):
    tty, before = terminal(100), sys.stderr

    def interrupted():
        with Progress(tty.stream, Clock()) as progress:
            progress.start(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sys.stderr is before
    assert tty.text().rstrip().endswith("\x1b[?25h")
    assert not any("Refresh" in type(thread).__name__ for thread in threading.enumerate())


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_progress_in_a_terminal_fits_its_width(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    tty, clock = terminal(columns), Clock()
    with Progress(tty.stream, clock) as progress:
        run(progress, clock)
    last_frame = tty.text().replace("\r", "").split("\x1b[2K")[-1]
    assert last_frame
    plain = [line for line in strip_escapes(last_frame).splitlines() if line.strip()]
    assert max(map(len, plain)) <= columns
    assert ("trials/s" in last_frame) == (columns >= 70)


def test_progress_of_a_killed_process_leaves_the_cursor_visible_on_a_line_of_its_own(terminal):
    code = "from xla_b2t.training.progress import Progress; import os, signal; p = Progress(); p.start(10); "
    tty = terminal(80)
    code += "p.update(1, 2.0, 3.0); p.message('still here'); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code], stderr=tty.stream, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    text = tty.text()
    assert "still here" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor stayed hidden"
    assert strip_escapes(text).endswith("\n")


def test_progress_in_a_dumb_terminal_is_plain(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    tty = terminal(80)
    with Progress(tty.stream, Clock()) as progress:
        progress.start(10)
    assert "\x1b" not in tty.text()


def test_progress_closed_twice_is_fine():
    progress = Progress(io.StringIO(), Clock())
    progress.close()
    progress.start(1)
    progress.close()
    progress.close()


def strip_escapes(text):
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)
