"""`--cores` means what it says, or an error says why."""

import pytest

from xla_b2t.errors import UserError
from xla_b2t.xla.machine import Machine, find_machine


@pytest.mark.parametrize(("kind", "cores", "asked", "ranks"), [
    ("cpu", 1, 0, 1), ("cpu", 1, 8, 8), ("tpu", 8, 0, 8), ("tpu", 8, 8, 8), ("tpu", 8, 1, 1), ("tpu", 1, 0, 1),
])  # fmt: skip
def test_ranks_of_possible_numbers_are_as_asked(kind, cores, asked, ranks):
    assert Machine(kind, cores).ranks(asked) == ranks


@pytest.mark.parametrize(
    ("cores", "asked", "what", "fix"),
    [
        (8, 16, "16 cores were asked for, this machine has 8", "use --cores 8"),
        (4, 8, "8 cores were asked for, this machine has 4", "use --cores 4"),
        (8, 3, "3 of 8 cores were asked for; torch_xla starts one or all", "--cores 1 or --cores 8"),
        (8, -1, "-1 cores were asked for", "give 1 or more"),
    ],
)
def test_ranks_that_a_tpu_cannot_start_are_refused(cores, asked, what, fix):
    with pytest.raises(UserError) as caught:
        Machine("tpu", cores).ranks(asked)
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where == "--cores"


def test_find_machine_without_tpu_takes_the_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr("glob.glob", lambda _: [])
    assert find_machine() == Machine("cpu", 1)


@pytest.mark.parametrize(("chosen", "what"), [("TPU", "no TPU chip is attached"), ("CUDA", "expected TPU or CPU")])
def test_find_machine_with_impossible_choice_says_so(monkeypatch, chosen, what):
    monkeypatch.setenv("PJRT_DEVICE", chosen)
    with pytest.raises(UserError) as caught:
        find_machine()
    assert what in caught.value.what and "unset PJRT_DEVICE" in caught.value.fix
    assert caught.value.where == "environment"
