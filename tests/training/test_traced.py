"""The training step as a program for eight TPU cores, traced in processes of its own."""

import json
import os
import re
import subprocess
import sys

import pytest

from xla_b2t.training import traced as traced_module
from xla_b2t.training.traced import traced_run
from xla_b2t.xla.target import V5E, device_kind
from xla_b2t.xla.trace_environment import ENVIRONMENT

pytest.importorskip("jax", reason="reads HLO, and writes kernels; JAX has wheels for CPython 3.11 and 3.12")

TRACE = """
import json
import multiprocessing
import sys
import torch
import torch_xla
from jaxlib import _jax
from xla_b2t import config as configuration
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.traced import blank_batch, trace_train_step

def trace(overrides):
    config = configuration.load(None, overrides)
    with torch.device("meta"):
        model = build_model(config.model, Sizes(16, 3, 41))
    try:
        program = trace_train_step(model, 41, config, 8, blank_batch(8, 60, 16, 10))
    except AssertionError as error:
        return str(error)
    return len(list(model.parameters())), _jax.XlaComputation(program).as_hlo_text()

with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(trace, json.loads(sys.argv[1]), chunksize=1)))
"""

BASELINE = ["model.options.hidden=128", "model.options.layers=2", "model.options.patch_bins=4"]
THREE = ["model.name=noise_split", *BASELINE[::2]]


WAYS = {
    "baseline": BASELINE,
    "without kernels": [*BASELINE, "model.options.kernel=false"],
    "three networks, sharded": [*THREE, "optimizer.sharded=true"],
    "accumulation": [*BASELINE, "train.accumulation=2"],
}


@pytest.fixture(scope="module")
def traced():
    """For each way the number of parameters and the program, or the refusal.

    A process can trace one program only, and to load torch_xla takes longer than to trace: it is loaded once, and each
    way has a process that is forked then, before the runtime starts.
    """
    command = [sys.executable, "-c", TRACE, json.dumps(list(WAYS.values()))]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(WAYS, json.loads(done.stdout), strict=True))


def test_traced_step_donates_its_state_reduces_and_runs_kernels(traced):
    num_parameters, text = traced["baseline"]
    header = text.partition("\n")[0]
    assert header.count("may-alias") == 4 * num_parameters + 1  # weights, masters, two moments, and the totals
    assert "replica_groups={{0,1,2,3,4,5,6,7}}" in text
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    assert text.count(" while(") == 1  # CTC; its gradient is in the same loop
    assert "f64[" not in text


def test_traced_step_without_kernels_has_the_loops_of_a_tpu(traced):
    _, text = traced["without kernels"]
    assert "tpu_custom_call" not in text
    assert text.count(" while(") == 5
    assert "u16[" not in text  # what XLA:CPU needs in place of bfloat16


def test_traced_step_of_three_networks_with_shared_state_scatters_and_gathers(traced):
    num_parameters, text = traced["three networks, sharded"]
    assert text.partition("\n")[0].count("may-alias") == 4 * num_parameters + 1
    assert "reduce-scatter(" in text
    assert "all-gather(" in text
    assert "f64[" not in text


def test_traced_step_with_accumulation_is_refused(traced):
    assert traced["accumulation"] == "with accumulation an update is two programs"


RUN = """
import json, sys
import torch
from xla_b2t import config as configuration
from xla_b2t.models.build import build_without_weights
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.traced import blank_batch, traced_run
from xla_b2t.xla.hlo_metadata import settled
from xla_b2t.xla.trace import hlo_text

said = {}
for name, overrides in json.load(sys.stdin).items():
    config = configuration.load(None, overrides)
    model = build_without_weights(config.model, Sizes(16, 3, 41))
    with traced_run(model, 41, config, 2) as run:
        batch = blank_batch(8, 60, 16, 10)
        graphs = [run.update(batch), {"evaluate": run.evaluation(batch)}, run.update(batch, 7)]
        first, evaluation, again = ({key: hlo_text(text) for key, text in each.items()} for each in graphs)
        known = {key: {n: [p.role, p.name] for n, p in each.items()} for key, each in run.parameters.items()}
        alike = [[use(graphs[0][key]) == use(graphs[2][key]) for key in first] for use in (bytes, settled)]
        said[name] = {"first": first, "again": again, **evaluation, "parameters": known, "alike": alike}
print(json.dumps(said))
"""
SMALL = ["model.options.hidden=8", "model.options.layers=1", "model.options.patch_bins=4", "model.options.kernel=false"]


@pytest.fixture(scope="module")
def runs():
    """Graphs of a run, as text, by the kind of run."""
    cases = {
        "plain": SMALL,
        "accumulation": [*SMALL, "train.accumulation=4"],
        "float32": [*SMALL, "model.dtype=float32"],
        "scheduled": ["model.name=noise_split", "model.options.patch_bins=4", "model.options.kernel=false"],
    }
    command, environment = [sys.executable, "-c", RUN], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "graphs"),
    [("plain", ["train"]), ("accumulation", ["micro", "apply"]), ("scheduled", ["train"])],
)
def test_traced_run_gives_an_update_as_one_program_and_with_accumulation_as_two(runs, case, graphs):
    assert list(runs[case]["first"]) == graphs


def without_lines(text):
    return re.sub(r", metadata=\{[^}]*\}", "", text)


@pytest.mark.parametrize("case", ["plain", "accumulation", "float32", "scheduled"])
def test_traced_run_gives_a_later_update_the_graph_that_the_first_had(runs, case):
    first, again = (runs[case][name] for name in ("first", "again"))
    assert {kind: without_lines(text) for kind, text in first.items()} == {
        kind: without_lines(text) for kind, text in again.items()
    }


@pytest.mark.parametrize("case", ["plain", "accumulation", "scheduled"])
def test_traced_run_gives_a_later_update_the_same_bytes_once_it_is_settled(runs, case):
    as_traced, as_settled = runs[case]["alike"]
    assert not any(as_traced), "the names of operations count on, or this shows nothing"
    assert all(as_settled)


def test_traced_run_is_for_the_kind_of_device_that_is_asked_for(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(traced_module, "TracedRun", lambda *_: device_kind())
    with traced_run(None, 41, None, 4, "TPU v4") as kind:
        assert kind == "TPU v4"
    with traced_run(None, 41, None, 8) as kind:
        assert kind == V5E


def test_traced_run_reduces_over_ranks_once_for_all_micro_steps(runs):
    assert "all-reduce(" in runs["plain"]["first"]["train"]
    assert "all-reduce(" not in runs["accumulation"]["first"]["micro"]
    assert "all-reduce(" in runs["accumulation"]["first"]["apply"]


def test_traced_run_evaluates_without_donating_or_reducing(runs):
    text = runs["plain"]["evaluate"]
    assert "alias" not in text.partition("\n")[0]
    assert "all-reduce(" not in text


def shapes_of(text):
    """Shapes of the program's parameters, by their numbers."""
    entry = text[text.index("\nENTRY") :]
    return {number: shape for shape, number in re.findall(r" = (\w+\[[\d,]*\])\S* parameter\((\d+)\)", entry)}


@pytest.mark.parametrize("case", ["plain", "accumulation", "float32", "scheduled"])
def test_traced_run_knows_every_parameter_of_its_programs_but_constants(runs, case):
    programs = {**runs[case]["again"], "evaluate": runs[case]["evaluate"]}
    for kind, text in programs.items():
        shapes, known = shapes_of(text), runs[case]["parameters"][kind]
        unknown = {shape for number, shape in shapes.items() if number not in known}
        assert known.keys() <= shapes.keys()
        assert len(set(map(tuple, known.values()))) == len(known)
        assert all(re.fullmatch(r"\w+\[\]|s32\[\d+\]", shape) for shape in unknown)


def test_traced_run_names_a_parameter_by_what_it_is_in_the_run(runs):
    plain, split = runs["plain"], runs["accumulation"]
    shapes = {
        tuple(known): shapes_of(plain["again"]["train"])[number]
        for number, known in plain["parameters"]["train"].items()
    }
    assert shapes["weight", "gru.weight_hh_l0"] == "bf16[24,8]"
    assert shapes["master", "gru.weight_hh_l0"] == shapes["moment1", "gru.weight_hh_l0"] == "f32[24,8]"
    assert shapes["input", "features_BTC"] == "bf16[8,60,16]"
    assert shapes["input", "learning rate"] == "f32[5]"
    assert ["sum", "gradient of gru.weight_hh_l0"] in split["parameters"]["micro"].values()
    assert ["weight", "gru.weight_hh_l0"] in plain["parameters"]["evaluate"].values()
    assert ["input", "scheduled"] in runs["scheduled"]["parameters"]["train"].values()


def test_traced_run_donates_state_and_no_input(runs):
    text, known = (runs["plain"][name]["train"] for name in ("again", "parameters"))
    donated = re.findall(r"\{\d+\}: \((\d+), \{\}, may-alias\)", text.partition("\n")[0])
    assert len(donated) == len([role for role, _ in known.values() if role != "input"])
    assert {known[number][0] for number in donated} == {"weight", "master", "moment1", "moment2", "sum"}


def test_traced_run_in_float32_has_no_matmul_and_no_state_in_bfloat16(runs):
    (plain, wide) = (runs[name]["first"]["train"] for name in ("plain", "float32"))
    for narrow in (r" = bf16\[[\d,]*\]\S* dot\(", r"->\(.*bf16\["):
        assert re.search(narrow, plain)
        assert not re.search(narrow, wide)
