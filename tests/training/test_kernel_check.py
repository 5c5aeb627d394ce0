"""Kernels are compared with loops before a run relies on them; Pallas interprets them here, in the place of a TPU."""

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.models.gru import GruStack
from xla_b2t.training.kernel_check import check_kernels, turn_off_kernels
from xla_b2t.xla import gru_kernel

BOTH = [("_forward", True), ("_backward",)]


def test_check_of_kernels_that_agree_names_their_widths(interpreted, xla_device):
    model = torch.nn.ModuleList([GruStack(7, 128, 2), GruStack(7, 100, 1)])  # 100 is no whole tile
    assert check_kernels(model, torch.bfloat16, trials=8, trains=True) == [128]
    assert interpreted == BOTH


def test_check_before_an_evaluation_takes_no_gradient(interpreted, xla_device):
    assert check_kernels(GruStack(7, 128, 1), torch.bfloat16, trials=8, trains=False) == [128]
    assert interpreted == [("_forward", False)]


def test_check_does_nothing_where_no_kernel_is_used(interpreted, xla_device):
    model = GruStack(7, 128, 1)
    assert check_kernels(model, torch.float32, trials=8, trains=True) == []
    turn_off_kernels(model)
    assert check_kernels(model, torch.bfloat16, trials=8, trains=True) == []
    assert interpreted == []


def test_check_of_a_kernel_that_differs_names_what_and_the_way_out(interpreted, monkeypatch, xla_device):
    true = gru_kernel.backward

    def wrong(*given):
        g_input, *others = true(*given)
        return [g_input * 1.1, *others]

    monkeypatch.setattr(gru_kernel, "backward", wrong)
    with pytest.raises(UserError) as caught:
        check_kernels(GruStack(7, 128, 1), torch.bfloat16, trials=8, trains=True)
    assert caught.value.what.startswith("the GRU kernel of width 128 gives another gradient 0 of 6 than the loop")
    assert caught.value.where == "this core's kernels"
    assert caught.value.fix == "set model.options.kernel=false (evaluate: --no-kernel), and report it"


def test_check_of_a_kernel_that_does_not_compile_names_the_way_out(interpreted, monkeypatch, xla_device):
    def broken(*given, keep):
        raise RuntimeError("Mosaic failed to compile")

    monkeypatch.setattr(gru_kernel, "forward", broken)
    with pytest.raises(UserError) as caught:
        check_kernels(GruStack(7, 128, 1), torch.bfloat16, trials=8, trains=True)
    assert caught.value.what == "the GRU kernel of width 128 does not run: Mosaic failed to compile"
    assert caught.value.where == "this core's kernels"
    assert "kernel=false" in caught.value.fix
