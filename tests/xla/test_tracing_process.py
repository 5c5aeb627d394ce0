"""Processes that end with the one that started them; how they are started is tested with what they do."""

import subprocess
import sys

from xla_b2t.xla.tracing_process import is_running


def test_process_is_running_until_it_ends():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert is_running(child, 0.01)
        child.stdin.close()
        assert not is_running(child, 60.0)
