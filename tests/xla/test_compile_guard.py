"""A compile too many and an operation that leaves the core are errors that name themselves."""

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import sync, to_device


def double(guard, bucket, values):
    (tensor,) = to_device([values])
    with guard.watch("train", bucket, f"features {tuple(values.shape)}"):
        doubled = tensor * 2 + 0.5
        sync()
    return doubled


def test_watch_of_one_graph_a_bucket_counts_first_compiles_only(xla_device):
    guard = CompileGuard()
    for _ in range(3):
        double(guard, 0, torch.ones(3, 5))
        double(guard, 1, torch.ones(4, 5))
    assert (guard.compiles, guard.compiles_after_warmup, guard.host_fallbacks) == (2, 0, 0)
    assert guard.knows("train", 1) and not guard.knows("train", 2) and not guard.knows("evaluate", 1)
    assert guard.compile_seconds > 0


def test_watch_of_shape_that_follows_data_names_new_and_old_shapes(xla_device):
    guard = CompileGuard()
    double(guard, 0, torch.ones(7, 11))
    with pytest.raises(UserError) as caught:
        double(guard, 0, torch.ones(8, 11))
    assert "compiled again for features (8, 11)" in caught.value.what and "features (7, 11)" in caught.value.what
    assert caught.value.where == "train step, bucket 0"
    assert "--allow-recompile" in caught.value.fix


def test_watch_that_allows_recompiles_counts_them(xla_device):
    guard = CompileGuard(allow_recompile=True)
    for rows in (21, 22, 23):
        double(guard, 0, torch.ones(rows, 2))
    assert (guard.compiles, guard.compiles_after_warmup) == (3, 2)


def add_logarithms(guard):
    (tensor,) = to_device([torch.rand(3, 3)])
    with guard.watch("train", 0, "features (3, 3)"):
        torch.logaddexp(tensor, tensor)
        sync()


def test_watch_of_operation_without_lowering_names_it(xla_device):
    guard = CompileGuard()
    with pytest.raises(UserError) as caught:
        add_logarithms(guard)
    assert "aten::logaddexp" in caught.value.what
    assert caught.value.where == "train step, features (3, 3)"
    assert "torch_xla lowers" in caught.value.fix
    assert guard.host_fallbacks >= 1
