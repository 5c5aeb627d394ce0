"""Which line is blamed: the user's own, as near to the operation as can be."""

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from xla_b2t.audit import lines
from xla_b2t.audit.lines import (
    is_users,
    line_here,
    line_of_function,
    line_of_traceback,
    line_that_prints,
)
from xla_b2t.xla.frames import INSTALLED as INSTALLED_FOLDERS
from xla_b2t.xla.frames import shown

HERE = Path(__file__)
TORCH = str(Path(torch.__file__).parent / "functional.py")
TRAINER = str(Path(lines.__file__).parents[1] / "models" / "patches.py")
AUDIT = str(Path(lines.__file__).parent / "surroundings.py")
INSTALLED = f"{INSTALLED_FOLDERS[0]}/somebody/layers.py"


def place_of(name):
    """The line of this file that ends with a comment of this name."""
    found = [n for n, line in enumerate(HERE.read_text("utf-8").splitlines(), 1) if line.endswith(f"# {name}")]
    (line,) = found
    return f"{shown(str(HERE))}:{line}"


def from_file(file, expression, **names):
    """A function whose code seems to lie in `file`."""
    exec(compile(f"def call(*args, **options):\n    return {expression}\n", file, "exec"), names)
    return names["call"]


def test_line_here_is_that_of_the_caller():
    assert line_here() == place_of("the caller")  # the caller


def test_line_here_in_a_function_is_the_users_innermost():
    def inner():
        return line_here()  # innermost

    assert from_file(TORCH, "inner()", inner=inner)() == place_of("innermost")


def test_line_here_below_torch_is_the_users_that_called_it():
    x = nn.Linear(2, 2)
    x.register_forward_hook(from_file(AUDIT, "seen.append(line_here())", line_here=line_here, seen=(seen := [])))
    x(torch.zeros(1, 2))  # calls a layer
    assert seen == [place_of("calls a layer")]


def test_line_here_below_the_trainer_is_the_users_that_called_it():
    inside = from_file(TORCH, "line_here()", line_here=line_here)
    trainers = from_file(TRAINER, "inside()", inside=inside)
    assert trainers() == place_of("calls the trainer")  # calls the trainer


def test_lines_of_the_user_come_before_an_installed_package_and_that_before_the_trainer():
    assert lines._best([(TORCH, 7), (TRAINER, 12), (TORCH, 3)]) == f"{shown(TRAINER)}:12"
    assert lines._best([(TRAINER, 3), (INSTALLED, 5), (TORCH, 1)]) == f"{shown(INSTALLED)}:5"
    assert lines._best([(INSTALLED, 5), (TRAINER, 3), (str(HERE), 8)]) == f"{shown(str(HERE))}:8"


def test_lines_of_whoever_asked_for_the_rehearsal_are_not_to_blame():
    assert lines._best([(TORCH, 1), (lines._REHEARSAL, 40), (str(HERE), 8)]) == ""
    assert lines._best([]) == ""


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (str(HERE), True),
        (TORCH, False),
        (TRAINER, False),
        (AUDIT, False),
        (INSTALLED, False),
        (textwrap.__file__, False),
        ("<string>", False),
    ],
)
def test_file_is_the_users_where_nobody_else_has_it(file, expected):
    assert is_users(file) is expected


def test_line_of_traceback_is_the_users_innermost_that_led_there():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)  # unequal
    assert line_of_traceback(caught.value.__traceback__) == place_of("unequal")
    assert line_of_traceback(None) == ""


def test_line_of_function_is_where_it_begins():
    def first():  # begins
        return 1

    assert line_of_function(first) == place_of("begins")
    assert "torch/nn/modules/linear.py:" in line_of_function(nn.Identity().forward)
    assert line_of_function(len) == ""


@pytest.fixture
def printed(monkeypatch):
    """The lines that turned a tensor into text."""
    seen, show = [], torch._tensor_str._str
    names = {"seen": seen, "show": show, "line": line_that_prints}
    watched = from_file(AUDIT, "seen.append(line()) or show(*args, **options)", **names)
    monkeypatch.setattr(torch._tensor_str, "_str", watched)
    return seen


def test_line_that_prints_is_the_users_where_a_tensor_becomes_text(printed):
    assert str(torch.zeros(1)) == "tensor([0.])"  # as text
    assert printed == [place_of("as text")]


def test_line_that_prints_is_none_where_torch_does_it_for_itself(printed):
    from_file(TORCH, "str(x)", x=torch.zeros(1))()
    assert printed == [""]


def test_shown_is_relative_below_the_working_directory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(str(tmp_path / "models" / "mine.py")) == "models/mine.py"
    assert shown(str(tmp_path.parent / "mine.py")) == str(tmp_path.parent / "mine.py")
