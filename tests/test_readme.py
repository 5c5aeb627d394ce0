"""The commands that the README shows do what it says, at a small size."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from xla_b2t.cli import main

ROOT = Path(__file__).parent.parent

SMALLER = {
    "synth": ["--sessions", "2", "--trials", "24", "--features", "16"],
    "prebatch": ["--buckets", "1"],
    "audit-dtypes": ["--cores", "1", "--set", "train.global_batch=16"],
    "plan-memory": ["--no-compiler"],
    "train": [
        *("--cores", "1", "--no-preflight"),
        *("--set", "train.steps=4", "--set", "train.global_batch=16", "--set", "train.log_every=2"),
        *("--set", "validation.every=4", "--set", "model.options.hidden=16", "--set", "model.options.layers=1"),
    ],
    "evaluate": [],
    "export": [],
}


def shown_commands():
    """Words of every line of the block under "Your own data" that makes, trains on and decodes simulated data."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## Your own data\n.*?```sh\n(.*?)```", text, flags=re.DOTALL).group(1)
    return [line.split() for line in block.splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Runs them all, in order, in one folder: (folder, [(name, stdout)]).

    In this process, so that torch is loaded once for all of them; that `python -m` gets there is tested in test_cli.py.
    """
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in shown_commands():
            arguments = ["train", *words[3:]] if words[0] == "python" else words[1:]
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                code = main([*arguments, *SMALLER[arguments[0]]])
            assert code == 0, " ".join(words)
            said.append((arguments[0], stdout.getvalue()))
    return folder, said


def test_readme_commands_go_from_nothing_to_an_error_rate(outputs):
    _, said = outputs
    assert [name for name, _ in said] == [
        "synth",
        "prebatch",
        "prebatch",
        "audit-dtypes",
        "plan-memory",
        "train",
        "evaluate",
        "evaluate",
        "export",
    ]
    assert "real bins" in said[1][1]
    assert "all is well" in said[2][1]
    assert said[3][1].startswith("clean: ")
    assert "trials a core configured, up to" in said[4][1]
    assert "val PER" in said[5][1]
    assert "PER" in said[6][1]


def test_readme_commands_leave_the_run_directory_that_it_describes(outputs):
    folder, _ = outputs
    names = {path.name for path in (folder / "runs/first").iterdir()}
    assert {"config.toml", "summary.json", "events.jsonl", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert (folder / "phonemes.jsonl").read_text(encoding="utf-8").count("\n") > 0
