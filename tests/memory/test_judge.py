"""What a verdict counts as: a refusal never fits, whatever it lists, and no answer is no figure."""

from contextlib import ExitStack, nullcontext

import pytest

from xla_b2t.errors import UserError
from xla_b2t.memory import judge as module
from xla_b2t.memory.chips import CHIPS
from xla_b2t.memory.estimate import Estimate
from xla_b2t.memory.graphs import Graph
from xla_b2t.memory.judge import Judge
from xla_b2t.xla.slices import slice_named
from xla_b2t.xla.verdict import Verdict

CHIP = CHIPS["v5e"]
BESIDE = 1000
NO_WORDS = "RESOURCE_EXHAUSTED: something ran out"
USED = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space {}. Used {} of {} {}."
SINGLE = (
    "RESOURCE_EXHAUSTED: Allocation (size=20346568704) would exceed memory (size=17179869184) :: #allocation2 "
    "[shape = 'bf16[616,7168,2304]{2,1,0:T(8,128)(2,1)}', space=hbm, tag = 'output of broadcast.1@{}']"
)


class Says(nullcontext):
    """A compiler that says the same to every program."""

    def __init__(self, verdict):
        super().__init__(self)
        self._verdict = verdict

    def compile(self, programs, on_verdict):
        for index, _ in enumerate(programs):
            on_verdict(index, self._verdict)


@pytest.fixture
def judged(monkeypatch):
    """The judge after it was given a verdict on its only graph, and that graph."""

    def judge(verdict, estimate_bytes=10**9):
        monkeypatch.setattr(module, "TpuCompiler", lambda *_, **__: Says(verdict))
        graph = Graph("train", b"program", {}, BESIDE, Estimate(estimate_bytes, {"weights": estimate_bytes}, ()))
        found = Judge(slice_named("v5e-8"), CHIP, 8, None, lambda *_: None, ExitStack())
        found.ask(iter([graph]), 1, "compiled")
        return found, graph

    return judge


def test_graph_that_nobody_asked_about_fits_by_arithmetic_with_its_margin_only():
    judge = Judge(slice_named("v5e-8"), CHIP, 8, None, lambda *_: None, ExitStack())
    for estimate_bytes, fits in ((int(0.75 * CHIP.hbm_bytes), True), (int(0.85 * CHIP.hbm_bytes), False)):
        graph = Graph("train", b"", {}, BESIDE, Estimate(estimate_bytes, {"weights": estimate_bytes}, ()))
        plan = judge.plan(graph)
        assert (plan.fits, plan.compiled_bytes, plan.estimate_bytes) == (fits, None, estimate_bytes + BESIDE)
        assert plan.parts == {"weights": estimate_bytes}


def test_refusal_for_hbm_needs_more_than_there_is_whatever_it_lists(judged):
    judge, graph = judged(Verdict(accepted=False, refusal=USED.format("hbm", "15.70G", "15.75G", "hbm")))
    assert judge.compiled_bytes(graph) == CHIP.hbm_bytes + 1 + BESIDE
    judge, graph = judged(Verdict(accepted=False, refusal=USED.format("hbm", "16.00G", "15.75G", "hbm")))
    assert judge.compiled_bytes(graph) == 16 * 2**30 + BESIDE
    plan = judge.plan(graph)
    assert plan.fits is False
    assert "Used 16.00G of 15.75G hbm" in plan.refusal


@pytest.mark.parametrize("words", [USED.format("vmem", "20.00M", "16.00M", "vmem"), SINGLE, NO_WORDS])
def test_refusal_without_a_figure_of_hbm_has_none_and_does_not_fit(judged, words):
    judge, graph = judged(Verdict(accepted=False, refusal=words))
    assert judge.compiled_bytes(graph) is None
    assert judge.plan(graph).fits is False


def test_single_allocation_that_is_too_large_is_named(judged):
    judge, graph = judged(Verdict(accepted=False, refusal=SINGLE))
    (allocation,) = judge.plan(graph).largest
    assert allocation.bytes == 20_346_568_704
    assert allocation.shape.startswith("bf16[616,7168,2304]")


def test_program_that_the_compiler_crashes_on_does_not_fit_and_says_so(judged):
    crash = UserError("the TPU's compiler ended with -6", "compiling for v5e-8", "report it")
    judge, graph = judged(Verdict(accepted=False, crash=crash))
    plan = judge.plan(graph)
    assert (plan.fits, plan.compiled_bytes, plan.refusal) == (False, None, "the TPU's compiler ended with -6")


def test_judge_counts_what_was_compiled_and_not_what_was_remembered(judged):
    for is_remembered in (False, True):
        judge, graph = judged(Verdict(accepted=False, refusal=NO_WORDS, is_remembered=is_remembered))
        judge.ask([graph, graph], 2, "again")
        assert judge.num_compiled == (not is_remembered)
