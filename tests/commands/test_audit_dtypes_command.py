"""The preflight as a user meets it: `audit-dtypes`, and what `train` does with it before anything is written."""

import json
import signal

import pytest

from xla_b2t import cli
from xla_b2t.audit import preflight as preflight_module
from xla_b2t.audit.findings import Finding, Report
from xla_b2t.xla import spawn

PARTS = {"kind", "name", "where", "found", "expected", "fix"}
CHECKED = ["parameters", "buffers", "optimizer_tensors", "inputs", "operations", "graphs"]
MODEL = """\
import torch
from torch import nn

from xla_b2t.models.protocol import DecoderOutput


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.output = nn.Linear({features}, sizes.num_classes)
{norm}
    def output_steps(self, input_bins):
        return max(1, input_bins)

    def forward(self, features_BTC, input_bins_B, days_B):
        x = features_BTC
        {line}
        return DecoderOutput(self.output(x), torch.clamp(input_bins_B, min=1))


def build(sizes, options):
    return Decoder(sizes)
"""
FEATURES = "sizes.num_features"
WIDENS = "x = x @ torch.eye(x.shape[2], device=x.device)"
READS = "x = x * x.sum().item()"
NORM = "x = self.norm(x.float()).to(x.dtype)"  # its weight and bias stay in float32
LINE = MODEL.replace("{norm}", "").splitlines().index("        {line}") + 1
KEPT = ["--set", 'model.keep_float32=["^norm"]']


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def arguments(small_groups, tmp_path):
    """Writes a user's model; gives the arguments of a command that names a run with it."""

    def write(line, features=FEATURES):
        norm = f"        self.norm = nn.LayerNorm({features})\n" if "self.norm" in line else ""
        (tmp_path / "mine.py").write_text(MODEL.format(line=line, features=features, norm=norm))
        keys = [f"data.dir={small_groups}", "run.dir=run", "train.batch_size=8", "train.steps=4"]
        keys.append("model.factory=mine.py:build")
        return ["--cores", "2", *[word for key in keys for word in ("--set", key)]]

    return write


@pytest.fixture
def reported(monkeypatch):
    """Puts a report in the place of the preflight; gives the ranks and keys that it was asked about."""

    def put(report):
        asked = []

        def preflight(config, num_ranks, resumed=None, given=None):
            asked.append((config.model.factory, num_ranks, given("train.steps")))
            return report

        monkeypatch.setattr(preflight_module, "preflight", preflight)
        return asked

    return put


@pytest.fixture
def started(monkeypatch):
    """Puts a note in the place of the ranks: how many, of each start."""
    ranks = []
    monkeypatch.setattr(spawn, "prepare", lambda *_: None)

    def run(function, arguments, machine, num_ranks, crash_dir, patience_s):
        ranks.append(num_ranks)
        raise spawn.RankError("no rank is started in this test")

    monkeypatch.setattr(spawn, "run", run)
    return ranks


CLEAN = Report((), dict(zip(CHECKED, (4, 0, 13, 8, 1411, 2), strict=True)), (), 3.25)
LOOKED_AT = "clean: 4 parameters, 0 buffers, 13 optimizer tensors, 8 inputs, 1,411 operations, 2 graphs in 3.2 s"
EYE = Finding("promotion", "Decoder: mm", "mine.py:19", "float32 (16, 16)", "bfloat16 throughout", "cast it")
DATA = Finding("groups", "groups", "groups", "there are no groups", "", "pre-batch them")


def test_audit_dtypes_of_sound_run_in_json_is_clean(arguments, capsys):
    assert cli.main(["audit-dtypes", *arguments(NORM), *KEPT, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) == {"clean", "findings", "checked", "exceptions", "seconds", "planned_bytes"}
    assert result["planned_bytes"] > 10_000
    assert result["clean"] is True and result["findings"] == []
    assert list(result["checked"]) == CHECKED
    assert result["checked"]["parameters"] == 4 and result["checked"]["buffers"] == 0
    assert result["checked"]["optimizer_tensors"] == 13
    assert all(type(count) is int for count in result["checked"].values())
    kept = [f"norm.{name} stays float32 (model.keep_float32 '^norm')" for name in ("weight", "bias")]
    assert result["exceptions"] == kept
    assert result["seconds"] > 0
    assert err == ""


def test_audit_dtypes_of_broken_run_in_json_has_all_findings_in_the_order_of_the_step(arguments, capsys):
    assert cli.main(["audit-dtypes", *arguments(f"{WIDENS}; {READS}"), "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["clean"] is False
    assert [finding["kind"] for finding in result["findings"]] == ["promotion", "host-read"]
    for finding in result["findings"]:
        assert set(finding) == PARTS
        assert all(finding.values())
        assert finding["where"] == f"mine.py:{LINE}"
    assert list(result["checked"]) == CHECKED


def test_audit_dtypes_of_wrong_feature_count_is_one_finding_with_both_numbers(arguments, capsys):
    assert cli.main(["audit-dtypes", *arguments("pass", features="512"), "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert "512" in finding["found"] and "16" in finding["found"]
    assert finding["where"].startswith("mine.py:")


def test_audit_dtypes_of_file_with_a_syntax_error_is_one_finding_with_its_line(arguments, capsys):
    assert cli.main(["audit-dtypes", *arguments("x = = 1"), "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["where"]) == ("model", f"mine.py:{LINE}")
    assert "SyntaxError" in finding["found"] and finding["fix"] == "correct the line"


def test_audit_dtypes_of_clean_run_prints_one_line(arguments, reported, capsys):
    asked = reported(CLEAN)
    assert cli.main(["audit-dtypes", *arguments("pass")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{LOOKED_AT}\n"
    assert err == ""
    assert asked == [("mine.py:build", 2, "--set train.steps=4")]


def test_audit_dtypes_of_run_with_exceptions_prints_them_before_the_line(arguments, reported, capsys):
    reported(Report((), CLEAN.checked, ("[norm] stays float32",)))
    assert cli.main(["audit-dtypes", *arguments("pass")]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "[norm] stays float32"
    assert last.startswith("clean: ")


def test_audit_dtypes_of_run_with_findings_prints_a_block_for_each_and_exits_2(arguments, reported, capsys):
    reported(Report((DATA, EYE), {}, (), 1.0))
    assert cli.main(["audit-dtypes", *arguments("pass")]) == 2
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines == [
        "1. groups: groups",
        "found there are no groups",
        "where groups",
        "fix pre-batch them",
        "2. promotion: Decoder: mm",
        "found float32 (16, 16)",
        "expected bfloat16 throughout",
        "where mine.py:19",
        "fix cast it",
        "2 findings: the numbers alone in 1.0 s",
    ]


def test_audit_dtypes_writes_no_run(arguments, reported, tmp_path):
    reported(CLEAN)
    assert cli.main(["audit-dtypes", *arguments("pass")]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_train_of_broken_model_refuses_before_anything_is_written_or_removed(
    arguments, reported, started, tmp_path, capsys, more
):
    reported(Report((EYE,), CLEAN.checked, (), 1.0))
    if more:
        earlier(tmp_path / "run")
    before = tree(tmp_path / "run")
    assert cli.main(["train", *arguments(WIDENS), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: Decoder: mm: found float32 (16, 16), expected bfloat16 throughout\n"
        "  where: mine.py:19\n"
        "  fix:   cast it\n"
    )
    assert tree(tmp_path / "run") == before
    assert started == []


def earlier(run_dir):
    """A run that is there already, with a checkpoint as far as `train` looks before it clears."""
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-4.pt").write_bytes(b"weights")
    (run_dir / "events.jsonl").write_text("{}\n")
    (run_dir / "summary.json").write_text("{}")


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_train_of_broken_model_is_refused_by_the_preflight_itself(arguments, started, tmp_path, capsys):
    """The whole way, with a run that --overwrite would remove."""
    earlier(tmp_path / "run")
    before = tree(tmp_path / "run")
    assert cli.main(["train", *arguments(WIDENS), "--overwrite"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"\n  where: mine.py:{LINE}\n  fix: " in err and "expected bfloat16 throughout" in err
    assert tree(tmp_path / "run") == before
    assert started == []


def test_train_of_broken_model_in_json_has_the_finding_as_its_error(arguments, reported, started, capsys):
    reported(Report((EYE,), CLEAN.checked, (), 1.0))
    assert cli.main(["train", *arguments(WIDENS), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["where"] == "mine.py:19" and error["fix"] == "cast it" and "float32 (16, 16)" in error["what"]


def test_train_of_sound_model_says_what_was_proven_and_starts(arguments, reported, started, tmp_path, capsys):
    asked = reported(Report((), CLEAN.checked, ("norm.weight stays float32 (model.keep_float32 '^norm')",), 3.25))
    assert cli.main(["train", *arguments("pass")]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[:2] == ["preflight: norm.weight stays float32 (model.keep_float32 '^norm')", f"preflight: {LOOKED_AT}"]
    assert started == [2]
    assert asked == [("mine.py:build", 2, "--set train.steps=4")]
    assert (tmp_path / "run" / "config.toml").exists()


def test_train_without_preflight_warns_and_starts_a_model_that_it_would_refuse(arguments, reported, started, capsys):
    asked = reported(Report((EYE,)))
    assert cli.main(["train", *arguments(WIDENS), "--no-preflight"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("warning: --no-preflight: no dtype, host read or graph of this run is proven. ")
    assert "as lost hours or not at all" in err
    assert asked == []
    assert started == [2]


def test_train_that_gets_sigterm_in_the_preflight_asks_to_be_started_again(arguments, started, monkeypatch, capsys):
    def ended(*_):
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(preflight_module, "preflight", ended)
    assert cli.main(["train", *arguments("pass")]) == 75
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "interrupted by SIGTERM, all ranks are gone; no checkpoint was written yet"
    assert started == []


def test_train_without_preflight_still_checks_the_numbers(arguments, started, tmp_path, capsys):
    words = [*arguments("pass"), "--set", "data.num_features=512", "--no-preflight"]
    assert cli.main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("warning: --no-preflight: ")
    assert "data.num_features: found 512, expected 16" in err
    assert "where: --set data.num_features=512" in err and "fix:   set data.num_features=16" in err
    assert started == []
    assert not (tmp_path / "run").exists()
