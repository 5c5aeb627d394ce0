"""What a compiled program holds: counted by hand on small programs, and beside the compiler's own peak."""

import pytest
import torch

from xla_b2t.memory.allocations import Allocation, unpadded_bytes, usage
from xla_b2t.training.traced import Parameter
from xla_b2t.xla.scan import scan
from xla_b2t.xla.slices import slice_named
from xla_b2t.xla.target import V5E, tracing_for
from xla_b2t.xla.tpu_compiler import compile_program
from xla_b2t.xla.trace import no_execution, placeholders, trace_numbered
from xla_b2t.xla.verdict import Verdict

PARAMETERS = {
    0: Parameter("weight", "gru.weight"),
    1: Parameter("master", "gru.weight"),
    2: Parameter("moment1", "gru.weight"),
    3: Parameter("sum", "running totals"),
    4: Parameter("input", "features_BTC"),
}

# The third value takes the donated parameter's place; the loop carries `zeros`, which its body updates there.
BUFFERS = """\
allocation 0: size 1000, parameter 0, shape |bf16[500]| at ShapeIndex {}, maybe-live-out:
 value: <0 Arg_0.1 @0> (size=1000,offset=0): bf16[500]{0}
allocation 1: size 2048, parameter 1, shape |f32[500]| at ShapeIndex {}, maybe-live-out:
 value: <1 update @0> (size=2048,offset=0): f32[512]{0}
 value: <2 Arg_1.1 @0> (size=2048,offset=0): f32[500]{0:T(1024)}
allocation 2: size 2048, parameter 2, shape |f32[500]| at ShapeIndex {}, maybe-live-out:
 value: <3 Arg_2.1 @0> (size=2048,offset=0): f32[500]{0:T(1024)}
allocation 3: size 512, parameter 3, shape |f32[5]| at ShapeIndex {}, maybe-live-out:
 value: <4 Arg_3.1 @0> (size=512,offset=0): f32[5]{0:T(128)}
allocation 4: size 6000, parameter 4, shape |bf16[3000]| at ShapeIndex {}:
 value: <5 Arg_4.1 @0> (size=6000,offset=0): bf16[3000]{0}
allocation 5: size 512, parameter 5, shape |f32[]| at ShapeIndex {}:
 value: <6 Arg_5.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 6: size 256, maybe-live-out:
 value: <7 loss @0> (size=256,offset=0): f32[]{:T(64)}
allocation 7: size 300, constant:
 value: <8 constant.1 @0> (size=300,offset=0): f32[75]{0}
allocation 8: size 20000, preallocated-temp:
 value: <9 zeros @0> (size=8192,offset=0): f32[3,5,100]{2,1,0:T(8,128)}
 value: <10 carried.0{1} (phi) @0> (size=8192,offset=0): f32[3,5,100]{2,1,0:T(8,128)}
 value: <11 update.1 @0> (size=8192,offset=0): f32[3,5,100]{2,1,0:T(8,128)}
 value: <12 copy-start.2{0} @0> (size=3000,offset=9000): bf16[1500]{0}
 value: <13 late @0> (size=10000,offset=0): f32[2500]{0}
 value: <14 spread @0> (size=700,offset=19300): f32[175]{0}
allocation 9: size 4096, color 1, preallocated-temp:
 value: <15 fast @0> (size=4096,offset=0): f32[1024]{0:S(1)}
    Arg_1.1{}:0-7
    update{}:7-11
    zeros{}:1-3
    carried.0{1}:3-7
    update.1{}:6-7
    copy-start.2{0}:2-8
    late{}:9-11
    spread{}:5-6
    fast{}:2-3
"""
TEXT = """\
HloModule step, is_scheduled=true

%stored (p.0: f32[3,5,100], p.1: s32[]) -> f32[3,5,100] {
  %p.0 = f32[3,5,100]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %one = f32[1,5,100]{2,1,0} broadcast(%p.1), metadata={op_name="aten__tanh" source_file="gru.py" source_line=7}
  ROOT %set = f32[3,5,100]{2,1,0} dynamic-update-slice(%p.0, %one, %p.1)
}

%body (state: (s32[], f32[3,5,100])) -> (s32[], f32[3,5,100]) {
  %state = (s32[], f32[3,5,100]{2,1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %rows = f32[3,5,100]{2,1,0} get-tuple-element(%state), index=1
  %update.1 = f32[3,5,100]{2,1,0} fusion(%rows, %count), kind=kLoop, calls=%stored
  ROOT %next = (s32[], f32[3,5,100]{2,1,0}) tuple(%count, %update.1)
}

ENTRY %main (Arg_4.1: bf16[3000]) -> f32[] {
  %Arg_4.1 = bf16[3000]{0} parameter(4)
  %zeros = f32[3,5,100]{2,1,0:T(8,128)} broadcast(%Arg_4.1)
  %smooth = bf16[1500]{0} slice(%Arg_4.1), metadata={op_name="aten__slice" source_file="augment.py" source_line=12}
  %copy-start.2 = (bf16[1500]{0}, bf16[1500]{0}, u32[]) copy-start(%smooth)
  %spread = f32[175]{0} exponential(%smooth)
  ROOT %loss = f32[]{:T(64)} reduce(%spread)
}
"""
PEAK = 1000 + (2048 + 2048 + 512) + (6000 + 512) + 256 + (8192 + 3000 + 700)


@pytest.fixture
def verdict():
    return Verdict(accepted=True, peak_bytes=PEAK + 300 + 40, code_bytes=5000, text=TEXT, buffers=BUFFERS)


def test_usage_tells_parameters_by_their_roles_and_counts_temporaries_where_most_are_needed(verdict):
    found = usage(verdict, PARAMETERS)
    assert (found.weights, found.optimizer, found.inputs) == (1000, 2048 + 2048 + 512, 6000 + 512)
    assert found.outputs == 256
    assert found.temporaries == 8192 + 3000 + 700
    assert found.gaps == 20000 - (8192 + 3000 + 700)
    assert found.program == 5000 + 300
    assert found.peak_bytes == PEAK
    assert found.unexplained == 40
    assert found.needed_bytes == PEAK + found.gaps + 5300


def test_usage_names_the_largest_that_are_there_at_that_moment_with_their_lines(verdict):
    found = usage(verdict, PARAMETERS, num_largest=5).largest
    assert found == (
        Allocation(8192, 6000, "f32[3,5,100]{2,1,0:T(8,128)}", "aten__tanh", "gru.py:7"),
        Allocation(6000, 6000, "bf16[3000]{0}", "input features_BTC", ""),
        Allocation(3000, 3000, "bf16[1500]{0}", "aten__slice", "augment.py:12"),
        Allocation(2048, 2000, "f32[500]{0:T(1024)}", "float32 master of gru.weight", ""),
        Allocation(2048, 2000, "f32[500]{0:T(1024)}", "first moment of gru.weight", ""),
    )


def test_usage_names_the_parameter_that_a_temporary_is_a_copy_of(verdict):
    text = verdict.text.replace("copy-start(%smooth)", 'copy-start(%Arg_4.1), metadata={op_name="xla__device_data"}')
    found = usage(Verdict(accepted=True, text=text, buffers=verdict.buffers), PARAMETERS)
    assert "copy of input features_BTC" in [allocation.what for allocation in found.largest]


def test_usage_gives_a_file_as_the_user_would_type_it(verdict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = verdict.text.replace("augment.py", f"{tmp_path}/mine/augment.py")
    found = usage(Verdict(accepted=True, text=text, buffers=verdict.buffers), PARAMETERS)
    assert "mine/augment.py:12" in [allocation.where for allocation in found.largest]


def test_usage_of_a_refused_program_has_no_peak_to_compare_with(verdict):
    refused = Verdict(accepted=False, refusal="RESOURCE_EXHAUSTED", text=verdict.text, buffers=verdict.buffers)
    found = usage(refused, PARAMETERS)
    assert found.peak_bytes == PEAK
    assert found.unexplained == 0


def test_usage_without_buffers_is_an_error():
    with pytest.raises(ValueError, match="said nothing of the program's buffers"):
        usage(Verdict(accepted=True), {})


def test_usage_knows_that_the_compiler_takes_fuller_vmem_for_hbm(verdict):
    fuller = verdict.buffers.replace("(size=4096,offset=0): f32[1024]", "(size=90000,offset=0): f32[1024]")
    peak = PEAK + 300 - (8192 + 3000 + 700) + 90_000
    found = usage(Verdict(True, peak_bytes=peak, text=verdict.text, buffers=fuller), PARAMETERS)
    assert usage(verdict, PARAMETERS).vmem == 4096
    assert (found.vmem, found.peak_bytes, found.unexplained) == (90_000, PEAK, 0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("bf16[45,512]{1,0:T(8,128)(2,1)}", 45 * 512 * 2), ("f32[]{:T(128)}", 4), ("pred[7]{0:T(512)S(1)}", 7)],
)
def test_unpadded_bytes_are_those_of_the_elements(shape, expected):
    assert unpadded_bytes(shape) == expected


def test_usage_of_a_compiled_step_agrees_with_the_compiler():
    """A weight is donated, a loop stacks its states in place, and the stack is needed twice."""
    pytest.importorskip("libtpu", reason="the TPU's compiler has wheels for CPython 3.11 and 3.12")
    steps, trials, hidden = 2000, 128, 512

    def step(weight, rows):
        def cell(carry, x, constants):
            after = torch.tanh(carry[0] @ constants[0] + x[0])
            return (after,), (after,)

        _, (stack,) = scan(cell, (rows[0],), (rows,), (weight,))
        weight.sub_(stack.sum(0).t() @ (stack * rows).sum(0))

    shapes = ((hidden, hidden), (steps, trials, hidden))
    with torch.no_grad(), no_execution(), tracing_for(V5E):
        tensors = placeholders([torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes])
        traced = trace_numbered(tensors[:1], lambda: step(*tensors), tensors)
    verdict = compile_program(traced.program, slice_named("v5e-8"), 1)
    roles = (Parameter("weight", "weight"), Parameter("input", "rows"))
    found = usage(verdict, dict(zip(traced.numbers, roles, strict=True)))
    assert verdict.accepted
    assert found.weights == hidden * hidden * 2
    assert steps * trials * hidden * 2 <= found.inputs < steps * trials * hidden * 2 + 10_000
    assert found.optimizer == 0
    stack = next(allocation for allocation in found.largest if not allocation.what.startswith("input"))
    assert stack.bytes == stack.unpadded_bytes == steps * trials * hidden * 2
    assert found.peak_bytes > 3 * stack.bytes / 2
    assert abs(found.unexplained) < 0.001 * verdict.peak_bytes
