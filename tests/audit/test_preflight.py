"""The preflight as a whole: both looks at once, and what it says when the one in a process of its own does not end."""

import os
import signal
import subprocess

import pytest

from xla_b2t import config as configuration
from xla_b2t.audit import inventory
from xla_b2t.audit.preflight import preflight
from xla_b2t.errors import UserError
from xla_b2t.xla import tracing_process
from xla_b2t.xla.trace_environment import ENVIRONMENT

OURS = [
    "model.options.hidden=8",
    "model.options.layers=1",
    "model.options.patch_bins=4",
    "model.options.patch_stride=2",
]
OURS += ["train.batch_size=8"]
DIES = """\
import os

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
        x = features_BTC + torch.zeros(features_BTC.shape[2], device=features_BTC.device)
        x = (x + 1, os.abort())[0]
        return DecoderOutput(self.output(x), torch.clamp(input_bins_B, min=1))


def build(sizes, options):
    return Decoder(sizes)
"""


@pytest.fixture
def config(small_groups):
    return configuration.load(None, [*OURS, f"data.dir={small_groups}"])


@pytest.fixture
def children(monkeypatch):
    """The processes that a preflight starts."""
    started, start = [], subprocess.Popen

    def noted(*args, **options):
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(tracing_process.subprocess, "Popen", noted)
    return started


@pytest.fixture
def child_does(monkeypatch, tmp_path):
    """Puts lines of shell in the place of the child; `$3` is the folder that it is given."""

    def replace(*lines):
        script = tmp_path / "child.sh"
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        script.chmod(0o755)
        monkeypatch.setattr(tracing_process.sys, "executable", str(script))

    return replace


def finding_in_json(line):
    parts = {"kind": "promotion", "name": "add", "where": line, "found": "float32", "expected": "", "fix": "cast it"}
    return "{" + ", ".join(f'"{key}": "{value}"' for key, value in parts.items()) + "}"


def report_in_json(*lines):
    return f'{{"findings": [{", ".join(map(finding_in_json, lines))}], "checked": {{"graphs": 2}}, "exceptions": []}}'


def test_preflight_of_forward_that_ends_the_process_is_a_finding_with_its_line(small_groups, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dies.py").write_text(DIES)
    keys = [f"data.dir={small_groups}", "train.batch_size=8", "model.factory=dies.py:build"]
    report = preflight(configuration.load(None, keys), 2)
    texts = DIES.splitlines()
    widens, dies = (f"dies.py:{n}" for n, text in enumerate(texts, 1) if "torch.zeros" in text or "abort()" in text)
    before, died = report.findings
    assert (before.kind, before.where) == ("promotion", widens)
    assert (died.kind, died.where) == ("host-read", dies)
    assert died.found == "an operation ended the process that traced it with SIGABRT"
    assert died.expected == "operations of the core, which need no value on the host"
    assert "replace the operation on this line" in died.fix
    assert report.checked == {}


def test_preflight_gives_the_numbers_first_and_then_what_the_child_found(config, child_does):
    child_does(f"echo '{report_in_json('mine.py:7')}' > $3/report.json")
    wrong = configuration.loads(configuration.dumps(config).replace("num_features = 0", "num_features = 512"), "config")
    report = preflight(wrong, 2, given=lambda key: f"--set {key}")
    assert [finding.where for finding in report.findings] == ["--set data.num_features", "mine.py:7"]
    assert report.checked == {"graphs": 2}


def test_preflight_of_run_without_data_tells_it_once(child_does, tmp_path):
    child_does(f"echo '{report_in_json()}' > $3/report.json")
    report = preflight(configuration.load(None, [*OURS, f"data.dir={tmp_path / 'none'}"]), 2)
    (finding,) = report.findings
    assert finding.kind == "groups" and str(tmp_path / "none") in finding.where and "prebatch" in finding.fix


def test_preflight_hands_the_child_its_task_and_an_environment_to_trace_under(config, child_does, tmp_path, children):
    child_does(f"env > {tmp_path}/env; cp $3/task.json {tmp_path}", f"echo '{report_in_json()}' > $3/report.json")
    preflight(config, 3)
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert {name: variables.get(name) for name in ENVIRONMENT} == ENVIRONMENT
    assert '"num_ranks":3' in (tmp_path / "task.json").read_text()
    assert children[0].args[1:3] == ["-m", "xla_b2t.audit.child"]


def test_preflight_that_does_not_end_says_what_where_and_fix(config, child_does, children, monkeypatch):
    monkeypatch.setattr("xla_b2t.audit.preflight._LIMIT_SECONDS", 0.2)
    child_does("exec sleep 1000")
    with pytest.raises(UserError) as caught:
        preflight(config, 2)
    error = caught.value
    assert error.what == "the preflight did not end within 0.2 s"
    assert error.where == "gru_decoder"
    assert "a loop that does not end" in error.fix
    assert children[0].returncode == -signal.SIGKILL


def test_preflight_of_users_model_that_does_not_end_names_its_factory(config, child_does, monkeypatch, small_groups):
    monkeypatch.setattr("xla_b2t.audit.preflight._LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(inventory, "numbers", lambda *_: [])
    child_does("exec sleep 1000")
    keys = [f"data.dir={small_groups}", "model.factory=mine.py:build"]
    with pytest.raises(UserError) as caught:
        preflight(configuration.load(None, keys), 2)
    assert caught.value.where == "mine.py:build"


def test_preflight_whose_numbers_fail_leaves_no_child_behind(config, child_does, children, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(inventory, "numbers", fail)
    child_does("exec sleep 1000")
    with pytest.raises(ZeroDivisionError):
        preflight(config, 2)
    assert children[0].returncode == -signal.SIGKILL


def test_preflight_that_fails_by_a_fault_of_ours_gives_its_last_words(config, child_does):
    child_does("echo KeyError: a rule >&2", "exit 3")
    with pytest.raises(RuntimeError, match=r"failed with 3:\nKeyError: a rule"):
        preflight(config, 2)


def test_preflight_of_child_that_dies_gives_what_it_had_found_the_line_and_torch_xlas_words(config, child_does):
    child_does(
        f"echo '[{finding_in_json('mine.py:7')}]' > $3/found.json",
        "printf 'mine.py:31                 ' > $3/line.txt",
        "echo 'F1130 tensor.cpp:9] Check failed: data != nullptr (no value)' >&2",
        "kill -SEGV $$",
    )
    before, died = preflight(config, 2).findings
    assert before.where == "mine.py:7"
    assert (died.where, died.kind) == ("mine.py:31", "host-read")
    assert died.found == "an operation ended the process that traced it with SIGSEGV: data != nullptr (no value)"


def test_preflight_of_child_that_dies_before_any_operation_says_forward(config, child_does):
    child_does("kill -ABRT $$")
    (died,) = preflight(config, 2).findings
    assert died.where == "forward"


def test_preflight_does_not_change_the_environment_of_its_own_process(config, child_does):
    before = dict(os.environ)
    child_does(f"echo '{report_in_json()}' > $3/report.json")
    preflight(config, 2)
    assert dict(os.environ) == before
