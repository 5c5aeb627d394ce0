"""The TPU's compiler on a machine without a TPU. A process takes a second or two to start: what can share one does."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.memory.chips import CHIPS
from xla_b2t.memory.step_time import predict
from xla_b2t.memory.timeline import HBM
from xla_b2t.xla import gru_kernel, tpu_compiler
from xla_b2t.xla.scan import scan
from xla_b2t.xla.slices import slice_named
from xla_b2t.xla.target import V5E, tracing_for
from xla_b2t.xla.tpu_compiler import TpuCompiler, compile_program, compile_programs
from xla_b2t.xla.trace import no_execution, placeholders, trace
from xla_b2t.xla.wire import field, parts, replaced, whole_number

pytest.importorskip("libtpu", reason="the TPU's compiler has wheels for CPython 3.11 and 3.12")

ROOT = Path(__file__).parents[2]
V5E_8 = slice_named("v5e-8")

STAND_IN = """\
import os, signal, sys, time
from pathlib import Path
from xla_b2t.files import replacing
from xla_b2t.xla.tpu_compiler_child import arriving, verdict_file
from xla_b2t.xla.tracing_process import end_with_parent
from xla_b2t.xla.verdict import Verdict, packed

folder, first, pipe = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
end_with_parent(pipe)
here = Path(__file__).parent
with open(here / "started.txt", "a") as file:
    print(os.getpid(), first, file=file)
for index, program in arriving(folder, first):
    (folder / str(index)).touch()
    while program == WAITS and not (here / "go").exists():
        time.sleep(0.01)
    if program == LATE:
        os.kill(os.getpid(), signal.SIGALRM)
    if program == DIES:
        print("F0 Check failed: a < b\\nmore", file=sys.stderr, flush=True)
        os.abort()
    with replacing(verdict_file(folder, index)) as partial:
        buffers = "" if program == PARTIAL else "allocation 0"
        partial.write_bytes(packed(Verdict(True, peak_bytes=index, text="HloModule", buffers=buffers)))
    if program == DIES_AFTER:
        os.abort()
"""
"""A compiler that takes no time, but for some programs: it is late, waits for a file, dies, or leaves buffers out."""

LATE, WAITS, DIES, DIES_AFTER, PARTIAL, QUICK, OTHER = (
    field(1, name) for name in (b"late", b"waits", b"dies", b"dies after", b"partial", b"quick", b"other")
)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts another process in the compiler's place; gives (process, first program) of each that was started."""
    names = "LATE", "WAITS", "DIES", "DIES_AFTER", "PARTIAL"
    named = "".join(f"{name} = {globals()[name]!r}\n" for name in names)
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace("folder, first", named + "folder, first", 1))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(tpu_compiler, "_CHILD", "stand_in")
    started = tmp_path / "started.txt"
    return lambda: [tuple(map(int, line.split())) for line in started.read_text().splitlines()] * started.exists()


def program(step, *shapes, dtype=torch.bfloat16):
    """The step on placeholders of these shapes, of which the first is changed in place."""
    with no_execution(), tracing_for(V5E):
        tensors = placeholders([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])
        return trace(tensors[:1], lambda: step(*tensors))


def squared(carry, x, constants):
    after = torch.tanh(carry[0] @ x[0])
    return (after,), (after,)


def scan_of_torch_xla(first, rows):
    from torch_xla.experimental.scan import scan

    return list(scan(lambda carry, row: (torch.tanh(carry @ row), carry + row), first, rows))


def test_compiler_accepts_a_matmul_and_its_estimate_is_near_the_datasheet():
    verdict = compile_program(program(lambda a, b: [a @ b], (4096, 4096), (4096, 4096)), V5E_8, 1)
    assert verdict.accepted
    assert verdict.argument_bytes == 2 * 4096 * 4096 * 2
    assert verdict.peak_bytes >= 3 * 4096 * 4096 * 2
    # 2 x 4096^3 operations at 197 TFLOP/s are 0.698 ms.
    assert 0.8 < predict(verdict.text, CHIPS["v5e"], 1).ms / 0.698 < 1.6


def test_prediction_for_what_only_moves_bytes_is_near_the_datasheet():
    """An addition in bf16, which the compiler estimates at three times its bytes; weights that it fetches early."""
    addition = program(lambda a, b: [a + b], (16384, 2048), (16384, 2048))
    few_rows = program(lambda a, b: [a @ b], (8, 4096), (4096, 4096))
    verdicts = compile_programs([addition, few_rows], V5E_8, 1)
    assert "copy-start" in verdicts[1].text
    limits_ms = 3 * 16384 * 2048 * 2 / 819e6, (8 + 4096 + 8) * 4096 * 2 / 819e6
    for verdict, limit_ms in zip(verdicts, limits_ms, strict=True):
        found = predict(verdict.text, CHIPS["v5e"], 1)
        assert 0.8 < found.ms / limit_ms < 1.6
        assert found.limit == HBM


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
    verdicts = compile_programs(programs, V5E_8, 1)
    found = {name: predict(verdict.text, CHIPS["v5e"], 1).flops for name, verdict in zip(cases, verdicts, strict=True)}
    assert found == {name: 2 * products for name, (_, _, products) in cases.items()}


def test_compiler_counts_a_donated_buffer_once():
    def step(weight):
        weight.add_(1)

    verdict = compile_program(program(step, (1024, 1024)), V5E_8, 1)
    assert verdict.aliased_bytes == verdict.argument_bytes == 1024 * 1024 * 2
    assert re.match(r"allocation 0: size 2097152, parameter 0, shape .*, maybe-live-out", verdict.buffers)
    assert verdict.peak_bytes < 1.5 * verdict.argument_bytes


def test_compiler_refuses_what_does_not_fit_in_its_own_words():
    def step(thin):
        wide = thin @ thin.t()  # 20 GB, and needed whole
        return [(wide @ wide)[0]]

    verdict = compile_program(program(step, (100_000, 128)), V5E_8, 1)
    assert not verdict.accepted
    assert "RESOURCE_EXHAUSTED" in verdict.refusal
    assert "ENTRY" in verdict.text
    assert "parameter 0, shape |bf16[100000,128]|" in verdict.buffers


@pytest.mark.parametrize(
    ("name", "batches"),
    [("v5e-8", (64, 8)), ("v6e-8", (64,)), ("v5p-8", (64,))],
)
def test_compiler_takes_the_gru_kernels_of_the_baseline(name, batches):
    steps, size, its_slice = 5, 768, slice_named(name)

    def step(projected, first, weights, bias, grad):
        hidden, kept = gru_kernel.forward(projected, first, weights.t(), bias, keep=True)
        return [hidden, *gru_kernel.backward(grad, hidden, first, kept, weights)]

    with tracing_for(its_slice.kind):
        assert all(gru_kernel.fits(trials, size, torch.bfloat16) for trials in batches)
    shapes = [
        ((steps, trials, 3 * size), (trials, size), (3 * size, size), (size,), (steps, trials, size))
        for trials in batches
    ]
    verdicts = compile_programs([program(step, *each) for each in shapes], its_slice, 1)
    assert [verdict.accepted for verdict in verdicts] == [True] * len(batches)
    for trials, verdict in zip(batches, verdicts, strict=True):
        assert verdict.text.count('custom_call_target="tpu_custom_call"') == 2
        found = predict(verdict.text, CHIPS[its_slice.chip], 1)
        rows = max(trials, 32)  # as many as the loading of weights takes
        assert found.flops == 2 * (2 * steps * rows * size * 3 * size), "the estimates that the kernels carry"
        assert 0 < found.kernel_ms <= found.ms


def test_compiled_loop_has_the_lines_of_its_own_operations():
    """The frames of a loop's body are of another table than the program's, which knows the same numbers."""

    def marked(message, operations):
        where = {b"dot": 11, b"tanh": 12}

        def instruction(old):
            line = where.get(next(part.value for part in parts(old) if part.number == 2)) if operations else 99
            places = field(3, b"/loop.py" if operations else b"/entry.py") + whole_number(4, line or 13)
            return old + field(7, field(2, b"aten") + places + whole_number(15, 1))

        return replaced(message, 2, instruction)

    with torch.no_grad():
        traced = program(lambda a, xs: [*scan(squared, (a,), (xs,))[1]], (128, 128), (9, 128, 128))
    entry = next(part.value for part in parts(traced) if part.number == 6)

    def computation(message):
        return marked(message, all(part.value != entry for part in parts(message) if part.number == 5))

    place = field(3, whole_number(1, 1) + whole_number(2, 1) + whole_number(3, 99))
    frames = field(1, b"/entry.py") + field(2, b"step") + place + field(4, whole_number(1, 1))
    verdict = compile_program(replaced(traced, 3, computation) + field(17, frames), V5E_8, 1)
    in_loop = {part.source for part in predict(verdict.text, CHIPS["v5e"], 1).parts if part.in_loop}
    assert "/loop.py:11" in in_loop
    assert not [source for source in in_loop if "/entry.py" in source]


def test_compiler_takes_a_program_for_all_devices_of_the_largest_slice():
    """Several hosts: libtpu does not compile for them unless it is told which rank is which device."""
    verdict = compile_program(program(lambda a, b: [a @ b], (128, 128), (128, 128)), slice_named("v5e-256"), 256)
    assert verdict.accepted
    assert "replica_count=256" in verdict.text


def test_compiler_for_a_slice_that_it_does_not_know_is_an_error():
    with pytest.raises(UserError) as caught:
        compile_program(program(lambda a: [a + 1], (8,)), replace(V5E_8, topology="v5e:7x9"), 1)
    assert re.match(r"libtpu \S+ has no v5e:7x9 with so many devices: .*v5e:7x9", caught.value.what)
    assert caught.value.where == "v5e-8"
    assert caught.value.fix == "take another slice, such as v5e-8"


def test_compiler_for_more_devices_than_the_slice_has_is_an_error():
    with pytest.raises(UserError) as caught:
        compile_program(program(lambda a: [a + 1], (8,)), slice_named("v4-8"), 8)
    assert caught.value.what.endswith("8 devices are needed, it has 4")
    assert caught.value.where == "v4-8"
    assert caught.value.fix == "take another slice, such as v5e-8"


def test_compiler_that_crashes_on_one_of_several_goes_on_behind_it(tmp_path):
    first, last = program(lambda a: [a + 1], (8,)), program(lambda a: [a * 2], (16, 1024))
    before, crashed, after = compile_programs([first, QUICK, last], V5E_8, 1, cache=tmp_path)
    assert (before.accepted, before.crash, after.accepted, after.crash) == (True, None, True, None)
    assert before.argument_bytes < 16 * 1024 * 2 <= after.argument_bytes
    assert not crashed.accepted
    assert crashed.crash.what.startswith("the TPU's compiler ended with 1: ")
    assert crashed.crash.where == "compiling for v5e-8"
    assert "the compiler itself failed" in crashed.crash.fix
    assert len(list(tmp_path.iterdir())) == 2, "a crash is not remembered"


def test_compiler_that_crashes_on_the_only_program_is_an_error(stand_in):
    with pytest.raises(UserError) as caught:
        compile_program(DIES, V5E_8, 1)
    assert caught.value.what == "the TPU's compiler ended with -6: F0 Check failed: a < b"
    assert caught.value.where == "compiling for v5e-8"
    assert "report it with the lines above" in caught.value.fix


def test_compiler_that_takes_too_long_over_one_of_several_tells_it_and_goes_on(stand_in):
    first, second, third = compile_programs([QUICK, LATE, OTHER], V5E_8, 1)
    assert (first.accepted, second.accepted, third.accepted) == (True, False, True)
    assert (first.peak_bytes, third.peak_bytes) == (0, 2)
    assert second.crash.what == "the TPU's compiler did not answer within 1200 s"
    assert second.crash.where == "v5e-8"
    assert second.crash.fix == "try a smaller bucket"
    assert [first for _, first in stand_in()] == [0, 2]


def test_compiler_that_takes_too_long_to_start_is_an_error():
    with pytest.raises(UserError) as caught:
        compile_program(program(lambda a: [a + 1], (8,)), V5E_8, 1, limit_seconds=0.01)
    assert caught.value.what == "the TPU's compiler did not answer within 0.01 s"
    assert caught.value.where == "v5e-8"
    assert caught.value.fix == "try a smaller bucket"


def test_compiler_tells_each_verdict_while_it_goes_on(stand_in, tmp_path):
    told = []

    def on_verdict(index, verdict):
        told.append((index, verdict.peak_bytes))
        (tmp_path / "go").touch()  # the second program waits for the first one's verdict to be told

    compile_programs([QUICK, WAITS, OTHER], V5E_8, 1, on_verdict=on_verdict)
    assert told == [(0, 0), (1, 1), (2, 2)]


def test_compiler_is_not_started_for_what_it_was_asked_before(stand_in, tmp_path):
    cache = tmp_path / "cache"

    def ask(*programs, goal=V5E_8, num_replicas=1, flags=()):
        verdicts = compile_programs(programs, goal, num_replicas, flags, cache)
        return [verdict.is_remembered for verdict in verdicts], len(stand_in())

    assert ask(QUICK) == ([False], 1)
    assert ask(QUICK) == ([True], 1)
    assert ask(OTHER, QUICK) == ([False, True], 2)
    assert ask(QUICK, OTHER) == ([True, True], 2)
    assert ask(QUICK, flags=("--xla_another=1",)) == ([False], 3)
    assert ask(QUICK, num_replicas=2) == ([False], 4)
    assert ask(QUICK, goal=slice_named("v5e-4")) == ([False], 5)
    assert ask(QUICK, goal=slice_named("v4-8")) == ([False], 6)
    assert ask(QUICK) == ([True], 6)


@pytest.mark.parametrize("keeps", [True, False])
def test_compiler_compiles_the_same_program_once_and_tells_it_of_each(stand_in, tmp_path, keeps):
    told = []
    cache = tmp_path / "cache" if keeps else None
    for _ in range(2):
        verdicts = compile_programs([QUICK, OTHER, QUICK], V5E_8, 1, (), cache, on_verdict=lambda i, v: told.append(i))
        assert [verdict.peak_bytes for verdict in verdicts] == [0, 1, 0]
    assert sorted(told) == [0, 0, 1, 1, 2, 2]
    assert len(stand_in()) == (1 if keeps else 2)


def test_compiler_that_dies_after_the_last_verdict_has_given_them_all(stand_in):
    verdicts = compile_programs([QUICK, DIES_AFTER], V5E_8, 1)
    assert [(verdict.peak_bytes, verdict.crash) for verdict in verdicts] == [(0, None), (1, None)]
    assert len(stand_in()) == 1


def test_compiler_is_asked_again_for_an_accepted_program_whose_buffers_are_missing(stand_in, tmp_path):
    for count in (1, 2):
        verdicts = compile_programs([QUICK, PARTIAL], V5E_8, 1, cache=tmp_path / "cache")
        assert [verdict.is_remembered for verdict in verdicts] == [count == 2, False]
        assert len(stand_in()) == count


def test_compiler_has_nothing_in_a_verdict_of_a_program_that_it_died_on_before():
    with TpuCompiler(V5E_8, 1) as compiler:
        dump = compiler._folder / "dump"
        dump.mkdir()
        dead = dump / "module_0001.dead.after_optimizations-buffer-assignment.txt"
        dead.write_text("allocation 0: size 5, of the dead one")
        os.utime(dead, (2**32, 2**32))  # newer than anything that a program leaves
        (found,) = compiler.compile([program(lambda a: [a + 1], (8,))])
    assert found.accepted
    assert "parameter 0" in found.buffers and "dead" not in found.buffers


def test_compiler_begins_before_all_programs_are_made_and_runs_on_for_more(stand_in):
    """The second program is made when the verdict on the first has come."""
    told = []

    def programs():
        yield QUICK
        while not told:
            time.sleep(0.01)
            yield QUICK
        yield OTHER

    with TpuCompiler(V5E_8, 1) as compiler:
        first, *_, last = compiler.compile(programs(), lambda index, _: told.append(index))
        (third,) = compiler.compile([LATE])
        assert third.crash is not None
        again, fourth = compiler.compile([QUICK, PARTIAL])
    assert [verdict.peak_bytes for verdict in (first, last, again, fourth)] == [0, 1, 0, 3]
    assert [first for _, first in stand_in()] == [0, 3]


def test_compiler_that_does_not_start_is_an_error_in_its_own_words(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_latency_hiding_scheduler_rerun=many")
    with pytest.raises(UserError) as caught:
        compile_program(QUICK, V5E_8, 1)
    assert re.match(
        r"the TPU's compiler did not start, it ended with 1: ERROR: Illegal value 'many'", caught.value.what
    )
    assert caught.value.where == "starting it for v5e-8"
    assert "LIBTPU_INIT_ARGS" in caught.value.fix


@pytest.mark.parametrize("flag", ["--xla_enable_async_all_gather=false", "--xla_mine=1"])
def test_compiler_is_told_the_users_flags_in_place_of_ours(stand_in, tmp_path, monkeypatch, flag):
    compile_programs([QUICK], V5E_8, 1, cache=tmp_path / "cache")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flag)
    assert not compile_programs([QUICK], V5E_8, 1, cache=tmp_path / "cache")[0].is_remembered
    told = tpu_compiler._environment(V5E_8, ())["LIBTPU_INIT_ARGS"].split()
    assert flag in told
    assert len(told) == len({each.partition("=")[0] for each in told})


def test_compiler_is_told_the_same_flags_where_torch_xla_has_set_them(stand_in, tmp_path, monkeypatch):
    compile_programs([QUICK], V5E_8, 1, cache=tmp_path / "cache")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(tpu_compiler._FLAGS))
    assert compile_programs([QUICK], V5E_8, 1, cache=tmp_path / "cache")[0].is_remembered


def test_compiler_does_not_outlive_the_process_that_asked_it(stand_in, tmp_path):
    code = f"""\
import importlib, sys
from xla_b2t.xla import tpu_compiler
from xla_b2t.xla.slices import slice_named
tpu_compiler._CHILD = "stand_in"
tpu_compiler.compile_programs([{WAITS!r}], slice_named("v5e-8"), 1)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "started.txt").exists() or not stand_in():
        assert parent.poll() is None
        time.sleep(0.01)
    ((child, _),) = stand_in()
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        time.sleep(0.01)  # for ever, where it goes on


def test_compiler_that_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None)
    assert not tpu_compiler.is_installed()
    with pytest.raises(UserError) as caught:
        compile_program(b"", V5E_8, 1)
    assert caught.value.what == "the TPU's compiler is not installed (jax, jaxlib, libtpu)"
    assert caught.value.where.startswith("Python 3.")
    assert "xla_b2t[tpu-compiler]" in caught.value.fix
