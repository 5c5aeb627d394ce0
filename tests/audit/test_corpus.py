"""The audit on the corpus of users' models: what is marked is found where it is marked, and nothing else.

All models are looked at in two child processes; a model that ends one fails alone, and the rest is looked at after it.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xla_b2t.xla.trace_environment import ENVIRONMENT

CORPUS = Path(__file__).parent / "corpus"
SCRIPT = Path(__file__).parent / "corpus_findings.py"
OURS = ["model gru_decoder", "model noise_split"]
BROKEN, CLEAN, MODULES = (
    sorted(str(path.relative_to(CORPUS)) for path in (CORPUS / folder).glob("*.py"))
    for folder in ("broken", "clean", "modules")
)
SOUND = [*CLEAN, *MODULES, *OURS]
VERBS = re.compile(
    r"\b(add|assign|bring|build|cast|compare|compute|convert|correct|draw|end|give|keep|leave|let|look|make|replace|return|"
    r"split|sum|take|use|write)\b"
)


def looked_at(names):
    """What the child says of each model."""
    said = {}
    while names:
        command = [sys.executable, str(SCRIPT), *names]
        environment = {**os.environ, **ENVIRONMENT}
        child = subprocess.run(command, cwd=CORPUS, env=environment, capture_output=True, text=True, check=False)
        entries = [json.loads(line) for line in child.stdout.splitlines() if line.startswith('{"model"')]
        said |= {entry["model"]: entry for entry in entries}
        left = names[len(entries) :]
        if left:
            last_words = child.stderr[-2000:]
            said[left[0]] = {"error": f"the process ended with {child.returncode}\n{last_words}"}
        names = left[1:]
    return said


LONG = """\
import torch
from torch import nn

from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.output = nn.Linear(sizes.num_features, sizes.num_classes)

    def output_steps(self, input_bins):
        return max(1, input_bins)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = features_BTC
        if x.shape[1] > 50:
            {line}  # finding
        return DecoderOutput(self.output(x), torch.clamp(input_bins_B, min=1))


def build(sizes, options):
    return Decoder(sizes)
"""
LONG_LINES = {"promotion": "x = x + torch.zeros(x.shape[2], device=x.device)", "host-read": "x = x * x.sum().item()"}


@pytest.fixture(scope="module")
def long_models(tmp_path_factory):
    """Files of models that do wrong with the trials of the longer bucket alone, by the kind of finding."""
    folder = tmp_path_factory.mktemp("long")
    for kind, line in LONG_LINES.items():
        (folder / f"{kind}.py").write_text(LONG.format(line=line))
    return {kind: str(folder / f"{kind}.py") for kind in LONG_LINES}


@pytest.fixture(scope="module")
def said(request, long_models):
    """What the child says of each model that a selected test asks for."""
    items = [item for item in request.session.items if item.module is request.module]
    wanted = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    names = [*(name for name in [*BROKEN, *SOUND] if name in wanted), *long_models.values()]
    with ThreadPoolExecutor(2) as pool:  # two children side by side
        first, second = pool.map(looked_at, (names[::2], names[1::2]))
    return first | second


def findings(said, name):
    assert not said[name].get("error"), f"{name}: {said[name]['error']}"
    return said[name]["findings"]


def marked(name):
    """(kind, place) of every finding that a file announces."""
    lines = (CORPUS / name).read_text(encoding="utf-8").splitlines()
    return [
        (match[1], f"{name}:{number}")
        for number, line in enumerate(lines, 1)
        if (match := re.search(r"# finding: (\S+)$", line))
    ]


@pytest.mark.parametrize("name", BROKEN)
def test_audit_of_broken_model_finds_what_is_marked_and_nothing_else(said, name):
    found = findings(said, name)
    assert {(finding["kind"], finding["where"]) for finding in found} == set(marked(name)), found
    told = [(finding["kind"], finding["where"], finding["name"]) for finding in found]
    assert len(set(told)) == len(told), found  # weight and bias of one layer are two, on one line


@pytest.mark.parametrize("name", SOUND)
def test_audit_of_sound_model_finds_nothing_and_looks_at_every_graph(said, name):
    assert findings(said, name) == []
    checked = said[name]["checked"]
    assert checked["graphs"] == 2  # of training and of evaluation
    assert checked["operations"] > 100
    assert checked["inputs"] == 8
    assert checked["optimizer_tensors"] > 3


@pytest.mark.parametrize("name", BROKEN)
def test_audit_of_broken_model_says_what_was_found_and_what_to_do(said, name):
    for finding in findings(said, name):
        assert finding["name"] and finding["found"], finding
        assert VERBS.search(finding["fix"]), finding
        assert finding["where"].startswith(f"{name}:"), finding


@pytest.mark.parametrize("kind", LONG_LINES)
def test_audit_of_model_that_does_wrong_with_long_trials_alone_finds_it(said, long_models, kind):
    (finding,) = findings(said, long_models[kind])
    line = LONG.splitlines().index("            {line}  # finding") + 1
    assert (finding["kind"], finding["where"]) == (kind, f"{long_models[kind]}:{line}")
