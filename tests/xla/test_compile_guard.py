"""A compile too many and an operation that leaves the core are errors that name themselves."""

import threading
from pathlib import Path

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.xla.compile_guard import CompileGuard, may_compile
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


def test_watch_of_a_phase_that_was_forgotten_may_compile_once_more(xla_device):
    guard = CompileGuard()
    double(guard, 0, torch.ones(9, 11))
    with guard.watch("evaluate", 0, "features (9, 11)"):
        pass
    guard.forget("train", "apply")
    assert not guard.knows("train", 0) and guard.knows("evaluate", 0)
    double(guard, 0, torch.ones(10, 11))
    assert guard.compiles_after_warmup == 0
    with pytest.raises(UserError, match=r"compiled before: evaluate features \(9, 11\); train features \(10, 11\)"):
        double(guard, 0, torch.ones(12, 11))


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
    assert caught.value.where == line_of("torch.logaddexp(tensor, tensor)")
    assert "torch_xla lowers" in caught.value.fix
    assert guard.host_fallbacks >= 1


def line_of(text):
    """Where a piece of this file stands for the first time."""
    before, _, _ = Path(__file__).read_text().partition(text)
    return f"{__file__}:{1 + before.count(chr(10))}"


class Reading(torch.nn.Module):
    """A model whose forward reads the core, in one of the ways that are easily written."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, values):
        hidden = values * 3 + 1
        if self.how == "item":
            return hidden / hidden.float().abs().mean().item()
        if self.how == "if" and (hidden * 2).sum() > 0:
            return hidden
        if self.how == "finished":
            return hidden * values[0, 0].item()
        if self.how == "cpu":
            return hidden + (hidden * 5).cpu().shape[0]
        if self.how == "sync":
            sync()
        return hidden - 0.25


def read_in(guard, how, rows, bucket=0):
    model = Reading(how)
    (tensor,) = to_device([torch.ones(rows, 7)])
    with guard.watch("train", bucket, f"features ({rows}, 7)"):
        output = model(tensor)
        sync()
    return output


@pytest.mark.parametrize(
    ("how", "rows", "code"),
    [
        ("item", 31, "hidden.float().abs().mean().item()"),
        ("if", 32, "(hidden * 2).sum() > 0"),
        ("finished", 33, "values[0, 0].item()"),
    ],
)
def test_watch_of_a_model_that_reads_a_value_names_its_line(xla_device, how, rows, code):
    guard = CompileGuard()
    with pytest.raises(UserError) as caught:
        read_in(guard, how, rows)
    assert "the step reads the core" in caught.value.what
    assert "aten::_local_scalar_dense (1 times)" in caught.value.what
    assert caught.value.where == line_of(code)
    assert ".item()" in caught.value.fix and "--allow-recompile" in caught.value.fix
    assert guard.host_fallbacks == 1


def test_watch_of_a_model_that_copies_to_the_host_names_its_line(xla_device):
    with pytest.raises(UserError) as caught:
        read_in(CompileGuard(), "cpu", 34)
    assert "was cut into 2 graphs" in caught.value.what
    assert caught.value.where == line_of("(hidden * 5).cpu()")
    assert ".cpu()" in caught.value.fix


def test_watch_of_a_model_that_ends_the_graph_says_into_how_many_it_was_cut(xla_device):
    with pytest.raises(UserError) as caught:
        read_in(CompileGuard(), "sync", 35)
    assert "was cut into 2 graphs" in caught.value.what
    assert caught.value.where == "train step, features (35, 7)"
    assert "torch_xla.sync()" in caught.value.fix


def test_watch_of_a_known_graph_that_begins_to_read_says_so(xla_device):
    guard = CompileGuard()
    read_in(guard, "nothing", 36)
    with pytest.raises(UserError) as caught:
        read_in(guard, "item", 36)
    assert "aten::_local_scalar_dense" in caught.value.what
    assert caught.value.where == "train step, features (36, 7)"
    assert ".item()" in caught.value.fix


def test_watch_that_allows_recompiles_lets_reads_through_and_counts_them(xla_device):
    guard = CompileGuard(allow_recompile=True)
    read_in(guard, "item", 37)
    read_in(guard, "item", 37)
    assert (guard.compiles, guard.compiles_after_warmup, guard.host_fallbacks) == (2, 0, 2)


def test_watch_by_the_backward_pass_that_reads_does_not_blame_the_line_that_began_it(xla_device):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * gradient.sum().item()

    (tensor,) = to_device([torch.ones(38, 7)])
    tensor.requires_grad_()
    guard = CompileGuard()
    with pytest.raises(UserError) as caught:
        differentiate(guard, lambda: Double.apply(tensor).sum())
    assert "aten::_local_scalar_dense" in caught.value.what
    assert caught.value.where == "train step, features (38, 7)"


def differentiate(guard, function):
    with guard.watch("train", 0, "features (38, 7)"):
        function().backward()
        sync()


def beside(function):
    """Runs a function in another thread, which stands for another rank of this process."""
    caught = []

    def run():
        try:
            function()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not caught, caught


def outside_a_step(rows):
    (tensor,) = to_device([torch.ones(rows, 9)])
    with may_compile():
        result = tensor * 4 - 1
        sync()
    return result


@pytest.mark.parametrize("other", ["new key", "outside a step"])
def test_watch_of_a_known_graph_is_not_blamed_for_the_compile_of_another_thread(xla_device, other):
    mine, others = CompileGuard(), CompileGuard()
    rows = {"new key": 41, "outside a step": 42}[other]
    double(mine, 0, torch.ones(rows, 9))
    (tensor,) = to_device([torch.ones(rows, 9)])
    with mine.watch("train", 0, "features"):
        beside(lambda: double(others, 1, torch.ones(rows + 10, 9)) if other == "new key" else outside_a_step(rows + 20))
        doubled = tensor * 2 + 0.5
        sync()
    assert doubled is not None
    assert (mine.compiles, mine.compiles_after_warmup) == (1, 0)
    assert (others.compiles, others.compiles_after_warmup) == (int(other == "new key"), 0)


def test_watch_of_new_graphs_in_two_threads_counts_one_for_each(xla_device):
    mine, others = CompileGuard(), CompileGuard()
    (tensor,) = to_device([torch.ones(43, 9)])
    with mine.watch("train", 0, "features (43, 9)"):
        beside(lambda: double(others, 0, torch.ones(44, 9)))
        doubled = tensor * 2 + 0.5
        sync()
    assert doubled is not None
    assert (mine.compiles, others.compiles) == (1, 1)


def test_watch_of_a_graph_that_another_rank_has_compiled_counts_it_for_this_rank_too(xla_device):
    guards = CompileGuard(), CompileGuard()
    for guard in guards:
        double(guard, 0, torch.ones(45, 9))
        double(guard, 0, torch.ones(45, 9))
    assert [(guard.compiles, guard.compiles_after_warmup) for guard in guards] == [(1, 0), (1, 0)]


def test_watch_after_another_threads_new_graph_still_refuses_a_compile_of_its_own(xla_device):
    guard = CompileGuard()
    double(guard, 0, torch.ones(46, 9))
    beside(lambda: double(CompileGuard(), 1, torch.ones(47, 9)))
    with pytest.raises(UserError, match="compiled again"):
        double(guard, 0, torch.ones(48, 9))
