"""What the audit lets pass trains: two updates on the CPU, and the TPU's compiler takes the whole step.

The models are those of the corpus in which there is nothing to find, and our own. A process trains them all, another
traces them all. A third compiles: not every program, which takes minutes, but so many that each kind of instruction in
any of them is in one that is compiled. `benchmarks/twins_tpu.py` compiles them all.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xla_b2t.xla.slices import slice_named
from xla_b2t.xla.tpu_compiler import compile_programs
from xla_b2t.xla.trace import hlo_text
from xla_b2t.xla.trace_environment import ENVIRONMENT

sys.path.insert(0, str(Path(__file__).parent))
from twin_steps import CORES, NAMES

TRAINING = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "1",
    # Every model compiles once and runs twice.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_llvm_disable_expensive_passes=true",
}

# As in `ROOT %add.3 = f32[4,41]{1,0} add(...)`: the dtype, of a tuple its first, and the operation.
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[.*? ([a-z][\w\-]*)\(", re.MULTILINE)


def start(what, folder, environment):
    """A child that goes through all models."""
    command = [sys.executable, str(Path(__file__).parent / "twin_steps.py"), what, str(folder)]
    with open(folder / "stderr.txt", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=log)


def results_of(child, folder):
    """What became of every model, by its name, and how the process ended."""
    child.wait()
    last_words = (folder / "stderr.txt").read_text(encoding="utf-8")[-2000:]
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    died = f"the process ended with {child.returncode} at {(folder / 'at.txt').read_text()}: {last_words}"
    return {result.pop("name"): result for result in map(json.loads, lines)}, died


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """Folder and process of either child: they run side by side."""
    folders = {what: tmp_path_factory.mktemp(what) for what in ("train", "trace")}
    started = {
        what: start(what, folders[what], environment)
        for what, environment in (("train", TRAINING), ("trace", ENVIRONMENT))
    }
    yield {what: (child, folders[what]) for what, child in started.items()}
    for child in started.values():
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def trained(children):
    return results_of(*children["train"])


@pytest.fixture(scope="module")
def programs(children):
    """The whole step of each model, by its name."""
    for module in ("jax", "libtpu"):
        pytest.importorskip(module, reason="the TPU's compiler has wheels for CPython 3.11 and 3.12")
    results, died = results_of(*children["trace"])
    assert list(results) == NAMES, died
    failed = {name: result["error"] for name, result in results.items() if "error" in result}
    assert not failed
    return {name: Path(result["program"]).read_bytes() for name, result in results.items()}


def chosen(programs):
    """Names of so many programs that every operation on every dtype in any of them is in one; the richest first."""
    kinds = {name: set(INSTRUCTION.findall(hlo_text(program))) for name, program in programs.items()}
    missing = set().union(*kinds.values())
    while missing:
        name = max(kinds, key=lambda name: len(kinds[name] & missing))
        missing -= kinds[name]
        yield name


@pytest.mark.parametrize("name", NAMES)
def test_model_that_the_audit_lets_pass_trains_without_a_second_compile(trained, name):
    results, died = trained
    assert name in results, died
    result = results[name]
    assert "error" not in result
    assert math.isfinite(result["objective"]) and math.isfinite(result["norm"])
    assert (result["updates"], result["trials"]) == (2, 6)
    assert (result["unfinite"], result["unmoved"]) == ([], [])
    assert (result["compiles"], result["compiles_after_warmup"], result["host_fallbacks"]) == (1, 0, 0)


def test_models_that_the_audit_lets_pass_are_taken_by_the_compiler_of_a_v5e(programs):
    names = list(chosen(programs))
    assert 10 <= len(names) <= 25
    verdicts = compile_programs([programs[name] for name in names], slice_named("v5e-8"), CORES)
    refused = {
        name: verdict.crash or verdict.refusal
        for name, verdict in zip(names, verdicts, strict=True)
        if not verdict.accepted
    }
    assert not refused
