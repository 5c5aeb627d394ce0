"""Looks at several runs as the child of a preflight does, in one process: a line of JSON on stdout for each.

In: on stdin a JSON object, name of a case -> overrides of the configuration. To be started in the folder that holds
the cases' models, under `xla_b2t.xla.trace_environment.ENVIRONMENT`.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path

import msgspec

from xla_b2t import config as configuration
from xla_b2t.audit.child import look

NUM_RANKS = 2


def said_of(overrides: list[str]) -> dict:
    """The report of a run, and what was kept on the way in case that the process would die."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            report = msgspec.to_builtins(look(configuration.load(None, overrides), NUM_RANKS, folder))
        except BaseException:
            return {"error": traceback.format_exc()}
        kept = {path.name: path.read_text() for path in folder.iterdir()}
        return {**report, "kept": kept}


if __name__ == "__main__":
    for case, overrides in json.load(sys.stdin).items():
        print(json.dumps({"case": case, **said_of(overrides)}), flush=True)
