"""Programs as text: float64 arrays, size, and graphs that are not the same when they must be."""

import pytest
import torch
from torch import nn

from xla_b2t.audit import lowered
from xla_b2t.xla.trace import hlo_text, no_execution, placeholders, trace

PROGRAM = """\
HloModule step.9, entry_computation_layout={(f32[4,3]{1,0}, s32[])->(f32[4,3]{1,0})}

%body.1 (state.2: (f32[4], s32[])) -> (f32[4], s32[]) {
  %state.2 = (f32[4]{0}, s32[]) parameter(0)
  %count.3 = s32[] get-tuple-element((f32[4]{0}, s32[]) %state.2), index=1
  ROOT %tuple.4 = (f32[4]{0}, s32[]) tuple(f32[4]{0} %values.3, s32[] %count.3)
}

ENTRY %step.9 (p0.1: f32[4,3], p1.2: s32[]) -> (f32[4,3]) {
  %p0.1 = f32[4,3]{1,0} parameter(0), metadata={op_type="xla__device_data" source_file="mine.py" source_line=3}
  %p1.2 = s32[] parameter(1)
  ROOT %tuple.5 = (f32[4,3]{1,0}) tuple(f32[4,3]{1,0} %p0.1)
}
"""


def with_line(line):
    return PROGRAM.replace("  %p1.2 =", f"  {line}\n  %p1.2 =")


def text_of(step, dtype=torch.bfloat16):
    """The program of a step over one tensor (4, 3), and what is found in it."""
    with no_execution():
        (x,) = placeholders([torch.empty(4, 3, device="meta", dtype=dtype)])
        return hlo_text(trace([], lambda: [step(x)]))


def test_opcodes_are_those_of_every_instruction_with_those_of_a_loop_once():
    body = ["parameter", "get-tuple-element", "tuple"]
    assert lowered.opcodes(PROGRAM) == [*body, "parameter", "parameter", "tuple"]
    assert lowered.opcodes("") == []


def test_opcodes_of_a_traced_step_name_its_operations():
    one, two = (lowered.opcodes(text_of(step)) for step in (torch.exp, lambda x: torch.exp(torch.exp(x))))
    assert one == ["parameter", "exponential", "tuple"]
    assert two == ["parameter", "exponential", "exponential", "tuple"]


def test_forbidden_of_program_in_allowed_dtypes_is_empty():
    assert lowered.forbidden(PROGRAM, "train graph of 40 bins") == []
    assert lowered.forbidden(text_of(lambda x: x.float().softmax(1).to(x.dtype)), "train graph") == []


@pytest.mark.parametrize("function", [nn.functional.leaky_relu, nn.functional.elu, lambda x: x.masked_fill(x > x, 0.5)])
def test_forbidden_lets_single_float64_numbers_pass(function):
    text = text_of(function)
    assert lowered.forbidden(text, "train graph") == []


def test_forbidden_test_of_single_numbers_has_one():
    assert "f64[]" in text_of(nn.functional.elu)


def test_forbidden_finds_a_comparison_with_a_python_float():
    (finding,) = lowered.forbidden(text_of(lambda x: x < 0.3), "train graph of 40 bins")
    assert (finding.kind, finding.name, finding.expected) == ("float64", "train graph of 40 bins", "no float64")
    assert finding.found == "float64 in 2 operations of the train graph of 40 bins"
    assert "a comparison with a Python float" in finding.fix and "dtype=torch.float64" in finding.fix


def test_forbidden_finds_float16_beside_float64():
    text = text_of(lambda x: (x < 0.3) & (x.half() + 1 > x))
    assert [finding.kind for finding in lowered.forbidden(text, "train graph")] == ["float64", "float16"]


def test_forbidden_finds_a_float64_array_that_a_loop_carries():
    (finding,) = lowered.forbidden(with_line("%l.7 = (f64[4]{0}, s32[]) while((f64[4]{0}, s32[]) %t.6)"), "train graph")
    assert finding.kind == "float64"
    assert finding.where == "train graph"


def test_forbidden_names_the_line_that_most_of_it_comes_from_as_the_user_would_type_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [f'"{tmp_path}/mine.py" source_line={line}' for line in (3, 7, 7)]
    lines = [
        f"%x.{n} = f64[4]{{0}} convert(f32[4]{{0}} %p0.1), metadata={{source_file={source}}}"
        for n, source in enumerate(sources, 6)
    ]
    (finding,) = lowered.forbidden(with_line("\n  ".join(lines)), "train graph")
    assert (finding.where, finding.found) == ("mine.py:7", "float64 in 3 operations of the train graph")


def test_too_large_is_beyond_the_largest_and_says_both_numbers(monkeypatch):
    assert lowered.too_large(PROGRAM, "train graph") == []
    monkeypatch.setattr(lowered, "LARGEST", 6)
    assert lowered.too_large(PROGRAM, "train graph") == []
    monkeypatch.setattr(lowered, "LARGEST", 5)
    (finding,) = lowered.too_large(PROGRAM, "train graph of 40 bins")
    assert (finding.kind, finding.where) == ("size", "train graph of 40 bins")
    assert (finding.found, finding.expected) == ("6 instructions", "at most 5")
    assert "xla_b2t.xla.scan.scan" in finding.fix


def test_too_large_refuses_an_unrolled_recurrence_of_247_steps():
    """Of 100,000 instructions; a decoder of five layers of loops has less than a tenth of what is allowed."""
    step = "\n".join(f"  %step.{n} = bf16[64,768]{{1,0}} add(bf16[64,768]{{1,0}} %x)" for n in range(100_000))
    (finding,) = lowered.too_large(f"ENTRY %step {{\n{step}\n}}", "train graph of 1,000 bins")
    assert (finding.found, finding.expected) == ("100,000 instructions", "at most 60,000")


def test_different_of_equal_graphs_is_empty_whatever_line_they_come_from():
    moved = PROGRAM.replace("source_line=3", "source_line=4")
    assert lowered.are_equal(PROGRAM, PROGRAM)
    assert lowered.are_equal(PROGRAM, moved)


def test_different_finds_another_operation_and_another_constant():
    more = with_line("%c.6 = f32[] constant(1)")
    assert not lowered.are_equal(PROGRAM, more)
    finding = lowered.another(PROGRAM, more, "train graph", "at the second update", "mine.py:3")
    assert (finding.kind, finding.name, finding.where) == ("recompile", "train graph", "mine.py:3")
    assert finding.found == "another graph at the second update: 6 and 7 instructions"
    assert finding.expected == "one graph for each bucket: any other is a compile"
    assert "the rank" in finding.fix
    other = more.replace("constant(1)", "constant(2)")
    assert not lowered.are_equal(more, other)
    finding = lowered.another(more, other, "train graph", "on the last rank", "mine.py:3")
    assert finding.found == "another graph on the last rank: 7 and 7 instructions"


def test_different_of_two_traces_of_one_step_is_empty():
    first, again = text_of(torch.tanh), text_of(torch.tanh)
    assert lowered.are_equal(first, again)
