"""The corpus of users' models that the audit is tested on: well-formed, and right where it says that it is right.

A broken file says with `# finding: KIND` on which line a finding must point. Its twin in `clean` is the same model with
that line mended. `modules` holds larger models in which there is nothing to find.
"""

import ast
import re
from pathlib import Path

import pytest
import torch

from xla_b2t.config import ModelConfig
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes, checked, scheduled_numbers

CORPUS = Path(__file__).parent / "corpus"
SIZES = Sizes(num_features=12, num_days=3, num_classes=41)
TRIALS = 4
KINDS = {
    *("promotion", "cast", "late-cast", "reduction", "dtype", "unregistered", "carry", "float64", "float16"),
    *("autocast", "host-read", "data-shape", "host-random", "host-fallback", "device", "unused", "shared"),
    *("buffer", "days", "protocol", "error", "recompile", "optimizer"),
}
BROKEN, CLEAN, MODULES = (sorted((CORPUS / folder).glob("*.py")) for folder in ("broken", "clean", "modules"))


def name(path):
    return f"{path.parent.name}/{path.stem}"


def markers(path):
    """(line, kind) of every finding that the file announces."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(n, found[1]) for n, line in enumerate(lines, 1) if (found := re.search(r"# finding: (\S+)$", line))]


def placed(path):
    """The model on the CPU as the trainer places it: every parameter and buffer in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        # torch_xla, where it was imported, puts a GRU for its own tensors in the place of PyTorch's.
        patch.setattr(torch.nn, "GRU", getattr(torch.nn.GRU, "_orig", torch.nn.GRU))
        return build_model(ModelConfig(factory=f"{path}:build", options={}), SIZES, seed=1).bfloat16()


def all_logits(output):
    return [output.logits_BPK, *(head.logits_BPK for head in output.heads)]


def test_corpus_has_a_broken_file_for_every_kind():
    assert {kind for path in BROKEN for _, kind in markers(path)} == KINDS


def test_corpus_has_a_clean_twin_for_every_broken_file():
    assert [path.name for path in BROKEN] == [path.name for path in CLEAN]
    assert len(MODULES) == 5


@pytest.mark.parametrize("path", BROKEN, ids=name)
def test_broken_file_says_what_is_wrong_and_marks_code(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    starts = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert ast.get_docstring(tree)
    assert markers(path)
    assert {line for line, _ in markers(path)} <= starts


@pytest.mark.parametrize("path", [*CLEAN, *MODULES], ids=name)
def test_clean_file_announces_no_finding(path):
    text = path.read_text(encoding="utf-8")
    assert "# finding" not in text
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", [*CLEAN, *MODULES], ids=name)
def test_clean_model_in_bfloat16_keeps_the_protocol_and_trains_every_parameter(path):
    model = placed(path).train()
    for bins in (40, 60):
        features_BTC = torch.randn(TRIALS, bins, SIZES.num_features, dtype=torch.bfloat16)
        input_bins_B = torch.tensor([bins, bins - 5, 3, 0], dtype=torch.int32)
        days_B = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
        output = model(features_BTC, input_bins_B, days_B, *scheduled_numbers(model, 500))
        output = checked(output, features_BTC, SIZES.num_classes, model)
        objective = sum(logits_BPK.float().square().mean() for logits_BPK in all_logits(output))
        if output.auxiliary_loss_B is not None:
            objective = objective + output.auxiliary_loss_B.sum()
        assert objective.isfinite()
        objective.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert not [key for key, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()]


@pytest.mark.parametrize("path", [*CLEAN, *MODULES], ids=name)
def test_clean_model_counts_steps_on_the_core_as_on_the_host(path):
    model = placed(path).eval()
    input_bins_B = torch.arange(61, dtype=torch.int32)
    features_BTC = torch.randn(61, 60, SIZES.num_features, dtype=torch.bfloat16)
    with torch.no_grad():
        output = model(features_BTC, input_bins_B, torch.zeros(61, dtype=torch.int32))
    assert output.steps_B.tolist() == [model.output_steps(bins) for bins in range(61)]
