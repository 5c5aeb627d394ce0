"""The TPU's compiler on a machine without a TPU. A process takes a second or two to start: what can share one does."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.memory import compiled_program
from xla_b2t.xla import gru_kernel, tpu_compiler
from xla_b2t.xla.scan import scan
from xla_b2t.xla.target import V5E, tracing_for
from xla_b2t.xla.tpu_compiler import compile_program, compile_programs
from xla_b2t.xla.trace import no_execution, placeholders, trace

pytest.importorskip("libtpu", reason="the TPU's compiler has wheels for CPython 3.11 and 3.12")

V5E_BYTES_PER_CYCLE = 819 / 1.5


def program(step, *shapes, dtype=torch.bfloat16):
    """The step on placeholders of these shapes, of which the first is changed in place."""
    with no_execution(), tracing_for(V5E):
        tensors = placeholders([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])
        return trace(tensors[:1], lambda: step(*tensors))


def milliseconds(verdict):
    costs = compiled_program.costs(compiled_program.parse(verdict.text), V5E_BYTES_PER_CYCLE)
    return sum(cost.cycles for cost in costs) / 1.5e6


def flops(verdict):
    parsed = compiled_program.parse(verdict.text)
    return compiled_program.flops(parsed, compiled_program.costs(parsed, V5E_BYTES_PER_CYCLE))


def squared(carry, x, constants):
    after = torch.tanh(carry[0] @ x[0])
    return (after,), (after,)


def scan_of_torch_xla(first, rows):
    from torch_xla.experimental.scan import scan

    return list(scan(lambda carry, row: (torch.tanh(carry @ row), carry + row), first, rows))


def test_compiler_accepts_a_matmul_and_its_estimate_is_near_the_datasheet():
    verdict = compile_program(program(lambda a, b: [a @ b], (4096, 4096), (4096, 4096)), "v5e:2x4", 1)
    assert verdict.accepted
    assert verdict.argument_bytes == 2 * 4096 * 4096 * 2
    assert verdict.peak_bytes >= 3 * 4096 * 4096 * 2
    # 2 x 4096^3 operations at 197 TFLOP/s are 0.698 ms.
    assert 0.8 < milliseconds(verdict) / 0.698 < 1.6


def test_compiled_programs_of_matmuls_have_their_flops():
    square = (128, 128), (9, 128, 128)
    cases = {
        "matmul": (lambda a, b: [a @ b], ((512, 256), (256, 384)), 512 * 256 * 384),
        "batched": (lambda a, b: [a @ b], ((6, 128, 256), (6, 256, 384)), 6 * 128 * 256 * 384),
        "loop": (lambda a, xs: [*scan(squared, (a,), (xs,))[1]], square, 9 * 128**3),
        "loop backwards": (lambda a, xs: [*scan(squared, (a,), (xs,), reverse=True)[1]], square, 9 * 128**3),
        "loop of torch_xla": (scan_of_torch_xla, square, 9 * 128**3),
    }
    with torch.no_grad():
        programs = [program(step, *shapes) for step, shapes, _ in cases.values()]
    verdicts = compile_programs(programs, "v5e:2x4", 1)
    found = {name: flops(verdict) for name, verdict in zip(cases, verdicts, strict=True)}
    assert found == {name: 2 * products for name, (_, _, products) in cases.items()}


def test_compiler_counts_a_donated_buffer_once():
    def step(weight):
        weight.add_(1)

    verdict = compile_program(program(step, (1024, 1024)), "v5e:2x4", 1)
    assert verdict.aliased_bytes == verdict.argument_bytes == 1024 * 1024 * 2
    assert verdict.peak_bytes < 1.5 * verdict.argument_bytes


def test_compiler_refuses_what_does_not_fit_in_its_own_words():
    def step(thin):
        wide = thin @ thin.t()  # 20 GB, and needed whole
        return [(wide @ wide)[0]]

    verdict = compile_program(program(step, (100_000, 128)), "v5e:2x4", 1)
    assert not verdict.accepted
    assert "RESOURCE_EXHAUSTED" in verdict.refusal


@pytest.mark.parametrize(
    ("slice_name", "kind", "batches"),
    [("v5e:2x4", V5E, (64, 8)), ("v6e:2x4", "TPU v6 lite", (64,)), ("v5p:2x2x1", "TPU v5", (64,))],
)
def test_compiler_takes_the_gru_kernels_of_the_baseline(slice_name, kind, batches):
    steps, size = 5, 768

    def step(projected, first, weights, bias, grad):
        hidden, kept = gru_kernel.forward(projected, first, weights.t(), bias, keep=True)
        return [hidden, *gru_kernel.backward(grad, hidden, first, kept, weights)]

    with tracing_for(kind):
        assert all(gru_kernel.fits(trials, size, torch.bfloat16) for trials in batches)
    shapes = [
        ((steps, trials, 3 * size), (trials, size), (3 * size, size), (size,), (steps, trials, size))
        for trials in batches
    ]
    verdicts = compile_programs([program(step, *each) for each in shapes], slice_name, 1)
    assert [verdict.accepted for verdict in verdicts] == [True] * len(batches)
    for trials, verdict in zip(batches, verdicts, strict=True):
        assert verdict.text.count('custom_call_target="tpu_custom_call"') == 2
        assert flops(verdict) == 2 * (2 * steps * trials * size * 3 * size), "the estimates that the kernels carry"


def test_compiler_for_an_unknown_slice_is_an_error():
    with pytest.raises(UserError) as caught:
        compile_program(program(lambda a: [a + 1], (8,)), "v5e:7x9", 1)
    assert caught.value.what.startswith("there is no such slice: ")
    assert caught.value.where == "v5e:7x9"
    assert caught.value.fix == "try v5e:2x4"


def test_compiler_that_crashes_is_an_error_with_its_last_words():
    with pytest.raises(UserError) as caught:
        compile_program(b"no program", "v5e:2x4", 1)
    assert caught.value.what.startswith("the TPU's compiler ended with 1: ")
    assert caught.value.where == "compiling for v5e:2x4"
    assert "the compiler itself failed" in caught.value.fix


def test_compiler_that_crashes_on_one_of_several_goes_on_behind_it():
    first, last = program(lambda a: [a + 1], (8,)), program(lambda a: [a * 2], (16, 1024))
    before, crashed, after = compile_programs([first, b"no program", last], "v5e:2x4", 1)
    assert (before.accepted, before.crash, after.accepted, after.crash) == (True, None, True, None)
    assert before.argument_bytes < 16 * 1024 * 2 <= after.argument_bytes
    assert not crashed.accepted
    assert crashed.crash.what.startswith("the TPU's compiler ended with 1: ")


def test_compiler_that_takes_too_long_over_one_of_several_tells_it_and_goes_on(monkeypatch):
    """A stand-in for the child, which begins with the second program and never ends."""
    asked = []

    def child(command, **_):
        folder, first = Path(command[3]), int(command[6])
        asked.append(first)
        for index in range(first, 3):
            (folder / str(index)).touch()
            if index == 1:
                return subprocess.CompletedProcess(command, -signal.SIGALRM, "", "")
            (folder / f"{index}.txt").write_text("")
            (folder / f"{index}.json").write_text('{"accepted": true}')
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tpu_compiler.subprocess, "run", child)
    first, second, third = compile_programs([b"", b"", b""], "v5e:2x4", 1)
    assert (first.accepted, second.accepted, third.accepted) == (True, False, True)
    assert second.crash.what == "the TPU's compiler did not answer within 1200 s"
    assert asked == [0, 2]


def test_compiler_that_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(tpu_compiler, "_LIMIT_SECONDS", 0.01)
    with pytest.raises(UserError) as caught:
        compile_program(program(lambda a: [a + 1], (8,)), "v5e:2x4", 1)
    assert caught.value.what == "the TPU's compiler did not answer within 0.01 s"
    assert caught.value.where == "v5e:2x4"
    assert caught.value.fix == "try a smaller bucket"


def test_compiler_that_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        compile_program(b"", "v5e:2x4", 1)
    assert caught.value.what == "the TPU's compiler is not installed (jax, libtpu)"
    assert caught.value.where.startswith("Python 3.")
    assert "xla_b2t[tpu-compiler]" in caught.value.fix
