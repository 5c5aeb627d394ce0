"""The training step as a program for eight TPU cores, traced in a process of its own."""

import os
import subprocess
import sys

import pytest

from xla_b2t.xla.trace_environment import ENVIRONMENT

pytest.importorskip("jax", reason="reads HLO, and writes kernels; JAX has wheels for CPython 3.11 and 3.12")

TRACE = """
import sys
import torch
from jaxlib import _jax
from xla_b2t import config as configuration
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.traced import blank_batch, trace_train_step

config = configuration.load(None, sys.argv[1:])
with torch.device("meta"):
    model = build_model(config.model, Sizes(16, 3, 41))
program = trace_train_step(model, 41, config, 8, blank_batch(8, 60, 16, 10))
print(len(list(model.parameters())))
print(_jax.XlaComputation(program).as_hlo_text())
"""

BASELINE = ["model.options.hidden=128", "model.options.layers=2", "model.options.patch_bins=4"]
THREE = ["model.name=noise_split", *BASELINE[::2]]


def traced(*overrides):
    """The number of parameters, and the program."""
    command = [sys.executable, "-c", TRACE, *overrides]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, _, text = done.stdout.partition("\n")
    return int(count), text


def test_traced_step_donates_its_state_reduces_and_runs_kernels():
    num_parameters, text = traced(*BASELINE)
    header = text.partition("\n")[0]
    assert header.count("may-alias") == 4 * num_parameters + 1  # weights, masters, two moments, and the totals
    assert "replica_groups={{0,1,2,3,4,5,6,7}}" in text
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    assert text.count(" while(") == 1  # CTC; its gradient is in the same loop
    assert "f64[" not in text


def test_traced_step_without_kernels_has_the_loops_of_a_tpu():
    _, text = traced(*BASELINE, "model.options.kernel=false")
    assert "tpu_custom_call" not in text
    assert text.count(" while(") == 5
    assert "u16[" not in text  # what XLA:CPU needs in place of bfloat16


def test_traced_step_of_three_networks_with_shared_state_scatters_and_gathers():
    num_parameters, text = traced(*THREE, "optimizer.sharded=true")
    assert text.partition("\n")[0].count("may-alias") == 4 * num_parameters + 1
    assert "reduce-scatter(" in text
    assert "all-gather(" in text
    assert "f64[" not in text


def test_traced_step_with_accumulation_is_refused():
    command = [sys.executable, "-c", TRACE, *BASELINE, "train.accumulation=2"]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert "with accumulation an update is two programs" in done.stderr
