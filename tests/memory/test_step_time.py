"""A whole program, counted by hand: a loop of matmuls, a kernel, a copy, a collective."""

import re

import pytest

from xla_b2t.memory.chips import Chip
from xla_b2t.memory.step_time import predict
from xla_b2t.memory.timeline import HBM, LINKS, MATRIX, OTHER

# A ms is 10^6 cycles, 10^9 bytes of HBM, 10^11 operations, 10^8 bytes to other chips.
CHIP = Chip("v5e", 1.0, 2**34, 0, 1000.0, 100.0, 200.0, 2**27, "made up")
PROGRAM = """HloModule one, is_scheduled=true

%product (p: bf16[256,512], q: bf16[512,1024]) -> bf16[256,1024] {
  %p.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %r.1 = bf16[256,1024]{1,0:T(8,128)(2,1)} convolution(%p.1, %q.1), dim_labels=bf_io->bf, %AT5%
}

%body (s: (s32[], bf16[256,512], bf16[512,1024])) -> (s32[], bf16[256,512], bf16[512,1024]) {
  %s.1 = (s32[], bf16[256,512]{1,0}, bf16[512,1024]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)S(6)} get-tuple-element(%s.1), index=0
  %one.1 = s32[]{:T(128)S(6)} constant(1)
  %next.1 = s32[]{:T(128)S(6)} subtract(%i.1, %one.1)
  %x.1 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s.1), index=1
  %w.1 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s.1), index=2
  %y.1 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%x.1, %w.1), kind=kOutput, calls=%product, %CYCLES3000%
  ROOT %t.1 = (s32[], bf16[256,512]{1,0}, bf16[512,1024]{1,0}) tuple(%next.1, %x.1, %w.1)
}

%condition (s: (s32[], bf16[256,512], bf16[512,1024])) -> pred[] {
  %s.2 = (s32[], bf16[256,512]{1,0}, bf16[512,1024]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %zero.2 = s32[] constant(0)
  ROOT %more.2 = pred[] compare(%i.2, %zero.2), direction=GT
}

ENTRY %one (a: bf16[256,512], b: bf16[512,1024], c: f32[1024,1024], d: s32[]) -> f32[1024,1024] {
  %a = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[1024,1024]{1,0:T(8,128)} parameter(2)
  %d = s32[] parameter(3)
  %n = s32[] constant(100)
  %s = (s32[], bf16[256,512]{1,0}, bf16[512,1024]{1,0}) tuple(%n, %a, %b)
  %loop = (s32[], bf16[256,512]{1,0}, bf16[512,1024]{1,0}) while(%s), condition=%condition, body=%body
  %kernel = f32[1024,1024]{1,0:T(8,128)} custom-call(%c), custom_call_target="tpu_custom_call", %AT7%, %COST%
  %moved = f32[1024,1024]{1,0:T(8,128)} copy(%kernel), %AT8%
  %sum = f32[1024,1024]{1,0:T(8,128)} all-reduce(%moved), replica_groups={{0,1,2,3}}, to_apply=%add, %AT9%
  ROOT %sorted = f32[1024,1024]{1,0:T(8,128)} sort(%sum), dimensions={0}, %AT8%, %CYCLES500000%
}
"""
NOTES = {
    r"%AT(\d)%": r'metadata={source_file="m.py" source_line=\1}',
    r"%CYCLES(\d+)%": r'backend_config={"estimated_cycles":"\1"}',
    r"%COST%": 'backend_config={"cost_estimate":{"flops":"9000000000","bytes_accessed":"8388608"}}',
}
for mark, note in NOTES.items():
    PROGRAM = re.sub(mark, note, PROGRAM)

LOOP_MS = 100 * 3000 / 1e6
KERNEL_MS = 9e9 / 1e11 / 0.9
COPY_MS = 2 * 2**22 / 1e9 / 0.9
SUM_MS = 2 * 3 / 4 * 2**22 / 1e8 / 0.9
SORT_MS = 0.5


@pytest.fixture(scope="module")
def found():
    return predict(PROGRAM, CHIP, 4)


def test_step_time_is_that_of_its_parts(found):
    assert found.ms == pytest.approx(LOOP_MS + KERNEL_MS + COPY_MS + SUM_MS + SORT_MS)
    assert (found.kernel_ms, found.loop_ms) == (pytest.approx(KERNEL_MS), pytest.approx(LOOP_MS))
    assert found.compiler_ms == pytest.approx(LOOP_MS + SORT_MS)
    assert found.unknown_loops == ()


def test_step_time_says_what_there_was_to_do(found):
    assert found.flops == 100 * 2 * 256 * 512 * 1024 + 9e9
    assert found.hbm_bytes == 2 * 2**22 * 3
    assert found.sent_bytes == 2 * 3 / 4 * 2**22


def test_step_time_says_what_limits_it(found):
    """A turn's products would take 0.0027 ms of its 0.003 at the peak; sorting reads and writes 0.008 of its 0.5."""
    assert found.limit == OTHER
    expected = {OTHER: SORT_MS, MATRIX: LOOP_MS + KERNEL_MS, LINKS: SUM_MS, HBM: COPY_MS}
    assert found.ms_by_limit == pytest.approx(expected)
    assert list(found.ms_by_limit) == sorted(expected, key=lambda limit: -expected[limit])


def test_step_time_is_told_by_lines_the_costliest_first(found):
    lines = {"m.py:8": COPY_MS + SORT_MS, "m.py:5": LOOP_MS, "m.py:7": KERNEL_MS, "m.py:9": SUM_MS}
    costly = {source: ms for source, ms in found.ms_by_source.items() if ms > 1e-6}
    assert costly == pytest.approx(lines)
    assert list(costly) == sorted(lines, key=lambda line: -lines[line])


def test_step_time_of_unknown_trips_counts_the_loop_once_and_names_it():
    found = predict(PROGRAM.replace("tuple(%n, %a, %b)", "tuple(%d, %a, %b)"), CHIP, 4)
    assert (found.loop_ms, found.unknown_loops) == (pytest.approx(LOOP_MS / 100), ("loop",))
