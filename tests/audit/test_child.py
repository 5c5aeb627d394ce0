"""What the preflight's child process says of runs of several kinds, and what it leaves should it die."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xla_b2t.xla.trace_environment import ENVIRONMENT

SCRIPT = Path(__file__).parent / "child_looks.py"
MODEL = """\
import torch
from torch import nn

from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.norm = nn.LayerNorm(sizes.num_features)
        self.output = nn.Linear(sizes.num_features, sizes.num_classes)

    def output_steps(self, input_bins):
        return max(1, input_bins)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = features_BTC
        {first}
        {second}
        return DecoderOutput(self.output(x), torch.clamp(input_bins_B, min=1))


def build(sizes, options):
    {build}
    return Decoder(sizes)
"""
NORM = "x = self.norm(x)"
MODELS = {
    "plain": {},
    "eye": {"first": "x = x + torch.eye(x.shape[2], device=x.device)[0]"},
    "two": {"first": "x = x + torch.zeros(1, 1, x.shape[2], device=x.device)", "second": "x.sum().item()  # reads"},
    "cast_by_hand": {"second": "x = self.norm(x.float()).to(x.dtype)"},
    "not_cast": {"second": NORM},
    "prints": {"build": "print('building')"},
    "asks_rank": {"first": "import torch_xla.runtime as core; x = x * (1 + core.global_ordinal())"},
    "counts": {"first": "self.calls = getattr(self, 'calls', 0) + 1; x = torch.cat([x] * self.calls)[: len(x)]"},
    "raises": {"build": "raise ValueError('eleven')"},
}
OURS = ["model.options.hidden=8", "model.options.layers=1", "model.options.patch_bins=4"]
KEPT = 'model.keep_float32=["^norm"]'
CASES = {
    "ours": OURS,
    "accumulation": [*OURS, "train.accumulation=2", "train.batch_size=16"],
    "sharded": [*OURS, "optimizer.sharded=true"],
    "sharded noise_split": ["model.name=noise_split", "model.options.patch_bins=4", "optimizer.sharded=true"],
    "float32": [*OURS, "model.dtype=float32"],
    "eye in float32": ["model.factory=eye.py:build", "model.dtype=float32"],
    "eye": ["model.factory=eye.py:build"],
    "eye in micro-steps": ["model.factory=eye.py:build", "train.accumulation=2", "train.batch_size=16"],
    "two": ["model.factory=two.py:build"],
    "kept": ["model.factory=cast_by_hand.py:build", KEPT],
    "kept, not cast": ["model.factory=not_cast.py:build", KEPT],
    "kept by no name": ["model.factory=plain.py:build", 'model.keep_float32=["^nrm"]'],
    "asks_rank": ["model.factory=asks_rank.py:build"],
    "counts": ["model.factory=counts.py:build"],
    "prints": ["model.factory=prints.py:build"],
    "raises": ["model.factory=raises.py:build"],
    "no file": ["model.factory=none.py:build"],
    "no data": ["data.dir=nowhere"],
    "batch that no group fits": ["train.batch_size=3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def said(small_groups, tmp_path_factory):
    """What the child says of every case."""
    folder = tmp_path_factory.mktemp("child")
    for name, lines in MODELS.items():
        parts = {"first": "pass", "second": "pass", "build": "pass", **lines}
        if name != "not_cast" and name != "cast_by_hand":
            parts["second"] += f"\n        {NORM}"
        (folder / f"{name}.py").write_text(MODEL.format(**parts))
    common = [f"data.dir={small_groups}", "train.batch_size=8"]
    cases = {case: [*common, *keys] for case, keys in CASES.items()}
    child = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(cases), cwd=folder, env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    entries = [json.loads(line) for line in child.stdout.splitlines() if line.startswith('{"case"')]
    assert child.returncode == 0, child.stderr[-4000:]
    return {entry["case"]: entry for entry in entries}


def report(said, case):
    assert not said[case].get("error"), said[case]["error"]
    return said[case]


def place(model, text):
    """The place of the line of a model that holds a text."""
    parts = {"first": "pass", "second": "pass", "build": "pass", **MODELS[model]}
    (line,) = [n for n, line in enumerate(MODEL.format(**parts).splitlines(), 1) if text in line]
    return f"{model}.py:{line}"


@pytest.mark.parametrize(
    ("case", "graphs"),
    [("ours", 2), ("accumulation", 3), ("sharded", 2), ("sharded noise_split", 2), ("float32", 2), ("prints", 2)],
)
def test_look_at_sound_run_is_clean_and_counts_what_it_saw(said, case, graphs):
    found = report(said, case)
    assert found["findings"] == []
    assert found["exceptions"] == []
    assert list(found["checked"]) == ["parameters", "buffers", "optimizer_tensors", "inputs", "operations", "graphs"]
    assert found["checked"]["graphs"] == graphs  # training (micro-step and update with accumulation) and evaluation
    assert found["checked"]["inputs"] == 8  # features, bins, labels, their lengths, steps, days, valid, controls
    assert found["checked"]["operations"] > 100


def test_look_counts_masters_and_moments_of_every_parameter_and_the_sums(said):
    parameters = report(said, "ours")["checked"]["parameters"]
    assert report(said, "ours")["checked"]["optimizer_tensors"] == 3 * parameters + 1
    assert report(said, "accumulation")["checked"]["optimizer_tensors"] == 3 * parameters + 1 + parameters + 1


@pytest.mark.parametrize("case", ["eye", "eye in micro-steps"])
def test_look_at_model_that_widens_finds_it_once(said, case):
    (finding,) = report(said, case)["findings"]
    assert (finding["kind"], finding["where"]) == ("promotion", place("eye", "torch.eye"))


def test_look_at_model_that_widens_is_clean_in_float32(said):
    assert report(said, "eye in float32")["findings"] == []


@pytest.mark.parametrize(("case", "when"), [("asks_rank", "on the last rank"), ("counts", "at the second update")])
def test_look_at_model_with_another_graph_later_or_on_another_rank_is_a_recompile(said, case, when):
    (finding,) = report(said, case)["findings"]
    assert (finding["kind"], finding["where"]) == ("recompile", place(case, "def forward"))
    assert finding["found"].startswith(f"another graph {when}: ")


def test_look_at_exception_that_is_cast_by_hand_is_clean_and_lists_it(said):
    found = report(said, "kept")
    assert found["findings"] == []
    assert found["exceptions"] == [
        "norm.weight stays float32 (model.keep_float32 '^norm')",
        "norm.bias stays float32 (model.keep_float32 '^norm')",
    ]


def test_look_at_exception_that_is_not_cast_names_it_and_both_ways_out(said):
    found = report(said, "kept, not cast")["findings"]
    assert [finding["where"] for finding in found] == [place("not_cast", "self.norm(x)")]
    assert "norm." in found[0]["found"]
    assert ".float()" in found[0]["fix"] and "model.keep_float32" in found[0]["fix"]


def test_look_at_exception_that_finds_nothing_is_a_finding_before_those_of_the_step(said):
    (finding,) = report(said, "kept by no name")["findings"]
    assert (finding["kind"], finding["where"]) == ("exception", "config: model.keep_float32")


@pytest.mark.parametrize(
    ("case", "found"), [("raises", "ValueError: eleven"), ("no file", "none.py"), ("no data", "no ")]
)
def test_look_at_run_with_nothing_to_look_at_says_that_and_nothing_else(said, case, found):
    said = report(said, case)
    (finding,) = said["findings"]
    assert finding["kind"] == "model" and found in finding["found"] and finding["where"] and finding["fix"]
    assert (said["checked"], said["kept"]) == ({}, {})


def test_look_at_run_whose_batch_cannot_be_had_looks_at_the_model_all_the_same(said):
    found = report(said, "batch that no group fits")
    assert found["findings"] == []
    assert found["checked"]["graphs"] == 2


def test_look_keeps_what_was_found_and_the_line_at_hand_should_it_die(said):
    found = report(said, "two")
    assert [(finding["kind"], finding["where"]) for finding in found["findings"]] == [
        ("promotion", place("two", "torch.zeros(")),
        ("host-read", place("two", "# reads")),
    ]
    kept = found["kept"]
    assert [finding["where"] for finding in json.loads(kept["found.json"])][:1] == [place("two", "torch.zeros(")]
    assert re.fullmatch(r"\S+\.py:\d+", kept["line.txt"].strip())
    assert "found.json" not in report(said, "ours")["kept"]
