"""Whose a line of Python is."""

from pathlib import Path

import torch

from xla_b2t.xla import frames
from xla_b2t.xla.frames import INSTALLED, blamed

MINE, TORCH = str(Path(__file__)), str(Path(torch.__file__).parent / "functional.py")
PACKAGE = Path(frames.__file__).parents[1]
LOOP, MODEL = str(PACKAGE / "xla" / "scan.py"), str(PACKAGE / "models" / "gru.py")
OTHERS = f"{INSTALLED[0]}/somebody/layers.py"


def test_blamed_is_the_users_innermost_wherever_it_was_called():
    assert blamed([(TORCH, 1), (OTHERS, 2), (MINE, 3), (MINE, 4), (LOOP, 5)]) == (MINE, 3)
    assert blamed([(LOOP, 1), (MODEL, 2), (MINE, 3)]) == (MINE, 3)


def test_blamed_without_the_user_is_another_package_and_then_the_trainer():
    assert blamed([(MODEL, 1), (TORCH, 2), (OTHERS, 3)]) == (OTHERS, 3)
    assert blamed([(TORCH, 1), (MODEL, 2), (MODEL, 3)]) == (MODEL, 2)


def test_blamed_within_the_trainer_is_what_called_its_loops_and_kernels():
    assert blamed([(LOOP, 1), (MODEL, 2)]) == (MODEL, 2)
    assert blamed([(TORCH, 1), (LOOP, 2)]) == (LOOP, 2)


def test_blamed_is_nobody_where_all_is_torchs():
    assert blamed([(TORCH, 1), ("<string>", 2)]) is None
    assert blamed([]) is None


def test_blamed_knows_packages_of_an_environment_by_another_path():
    elsewhere = "/linked/venv/lib/python3.11/site-packages/{}/x.py"
    assert blamed([(elsewhere.format("torch_xla"), 1), (MODEL, 2)]) == (MODEL, 2)
    assert blamed([(elsewhere.format("torch"), 1)]) is None
    assert blamed([(elsewhere.format("torchmetrics"), 1), (MODEL, 2)]) == (elsewhere.format("torchmetrics"), 1)
