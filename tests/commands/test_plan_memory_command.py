"""`plan-memory` as a user meets it: arithmetic and compiler, advice, rules for other devices, and what it refuses."""

import json

import pytest

from tests.training.whole_runs import call
from xla_b2t.xla import tpu_compiler

SMALL = ["model.options.hidden=128", "model.options.layers=1", "model.options.patch_bins=4", "train.steps=1000"]
AHEAD = ("--bins", "64,128", "--features", "128", "--days", "3")
READS = """\
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
        x = features_BTC * features_BTC.sum().item()
        return DecoderOutput(self.output(x), torch.clamp(input_bins_B, min=1))


def build(sizes, options):
    return Decoder(sizes)
"""


def plan(*more, keys=()):
    options = [word for key in (*SMALL, *keys) for word in ("--set", key)]
    return call("plan-memory", *options, *more)


@pytest.fixture(scope="module")
def by_compiler(tmp_path_factory):
    """What it says with the compiler: first, and again from the cache."""
    if not tpu_compiler.is_installed():
        pytest.skip("the TPU's compiler has wheels for CPython 3.11 and 3.12 only")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return plan(*AHEAD, "--json"), plan(*AHEAD, "--json")


def test_plan_by_the_compiler_puts_both_figures_beside_each_other(by_compiler):
    done, _ = by_compiler
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["topology"] == "v5e-8" and said["num_ranks"] == 8
    assert said["hbm_bytes"] == (16384 - 258) * 2**20
    assert [bucket["input_bins"] for bucket in said["buckets"]] == [64, 128]
    short, long = said["buckets"]
    for bucket in (short, long):
        assert bucket["fits"] is True
        assert 0.5 < bucket["estimate_bytes"] / bucket["compiled_bytes"] < 2
        assert bucket["predicted_step_ms"] > 0
        assert bucket["largest"] and all(one["bytes"] > 0 for one in bucket["largest"])
    assert short["compiled_bytes"] < long["compiled_bytes"]
    assert short["predicted_step_ms"] < long["predicted_step_ms"]
    mean_s = sum(bucket["share"] * bucket["predicted_step_ms"] for bucket in (short, long)) / 1000
    assert said["hours"] == pytest.approx(1000 * mean_s / 3600)
    assert said["recommended"]["batch_size"] >= said["batch_size"] == 8


def test_plan_made_again_compiles_nothing_and_says_the_same(by_compiler):
    first, again = (json.loads(done.stdout) for done in by_compiler)
    assert (first.pop("compiled_programs"), again.pop("compiled_programs")) == (3, 0)
    assert first.pop("seconds") > 0
    assert again.pop("seconds") > 0
    assert again == first


def test_plan_without_the_compiler_is_arithmetic_and_says_so():
    done = plan(*AHEAD, "--no-compiler")
    assert done.returncode == 0, done.stderr
    assert "by arithmetic alone" in done.stdout
    assert "8 trials a core configured, up to" in done.stdout
    assert "fewer cores never give a core more" in done.stdout
    assert "--batch-size auto asks the compiler" in done.stdout


def test_plan_of_data_takes_their_buckets_and_shares(small_groups):
    done = plan("--no-compiler", "--json", keys=[f"data.dir={small_groups}", "train.global_batch=64"])
    (bucket,) = json.loads(done.stdout)["buckets"]
    assert bucket["share"] == 1.0
    assert bucket["compiled_bytes"] is None and bucket["predicted_step_ms"] is None


def test_plan_of_batch_that_does_not_fit_ends_with_2_and_says_how_it_fits():
    keys = ["train.batch_size=4096", "model.options.hidden=2048"]
    done = plan("--bins", "4000", "--features", "512", "--no-compiler", keys=keys)
    assert done.returncode == 2
    assert "does not fit" in done.stdout
    assert "--set train.accumulation=" in done.stdout


def test_plan_with_accumulation_plans_its_two_programs():
    done = plan(
        "--bins", "64", *AHEAD[2:], "--no-compiler", "--json", keys=["train.batch_size=8", "train.accumulation=2"]
    )
    said = json.loads(done.stdout)
    assert [one["program"] for one in said["buckets"][0]["programs"]] == ["micro", "apply", "evaluate"]
    assert (said["batch_size"], said["accumulation"], said["global_batch"]) == (8, 2, 128)
    assert said["same_global_batch"]["keys"] == "--set train.batch_size=16 --set train.accumulation=1"


def test_plan_of_model_whose_step_cannot_be_traced_names_the_line_and_sends_to_the_audit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reads.py").write_text(READS)
    done = call("plan-memory", "--set", "model.factory=reads.py:build", *AHEAD, "--no-compiler")
    line = next(number for number, text in enumerate(READS.splitlines(), 1) if ".item()" in text)
    assert done.returncode == 2
    assert "the step cannot be traced: RuntimeError: Unexpected execution" in done.stderr
    assert f"where: reads.py:{line}" in done.stderr
    assert "run xla_b2t audit-dtypes" in done.stderr


@pytest.mark.parametrize(
    ("words", "what", "where", "fix"),
    [
        (
            ("--topology", "v5e-9"),
            "no slice of up to 256 chips has this name; the nearest is v5e-8",
            "v5e-9",
            "v5e-1/4/8/16",
        ),
        (("--bins", "400,x"), "'400,x' is no list of numbers of bins", "--bins", "write --bins 400,800,1600"),
        (("--margin", "5"), "the margin is 5.0, expected a share from 0 to below 1", "--margin", "0.05"),
        (("--cores", "3"), "3 cores were asked for; v5e-8 has 8", "--cores", "leave --cores out for all 8, or give 1"),
        (("--features", "0"), "--features is 0, expected 1 to 1,000,000", "--features", "what the data"),
        (("--days", "99999999999"), "--days is 99999999999, expected 1 to 1,000,000", "--days", "what the data"),
        (("--precision", "int8"), "--precision would be ignored", "the command line", "add --free-memory"),
        (("--free-memory", "1GB", "--no-cache"), "--no-cache would be ignored", "the command line", "leave one"),
        (("--free-memory", ""), "'' is no size", "--free-memory", "write it as 3669MB"),
        (
            ("--batch-size", "auto", "--no-compiler"),
            "--batch-size auto asks the compiler, --no-compiler forbids it",
            "the command line",
            "give one of them",
        ),
    ],
)
def test_plan_with_words_that_do_not_go_says_what_where_and_fix(words, what, where, fix):
    ahead = (
        AHEAD
        if words[0] not in ("--bins", "--features", "--days")
        else AHEAD[:2]
        if words[0] in ("--features", "--days")
        else ()
    )
    done = call("plan-memory", "--json", *ahead, *words)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert what in error["what"]
    assert where in error["where"]
    assert fix in error["fix"]


def test_plan_by_free_memory_takes_the_size_from_the_model():
    done = plan(*AHEAD, "--free-memory", "3669MB", "--precision", "int8", "--max-batch", "128", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert said["usable_bytes"] == 2_935_200_000
    assert said["weights_bytes"] == said["num_parameters"] > 100_000
    assert said["per_sample_bytes"] == 19_661  # 128 bins x 128 features x 1.2, rounded up
    assert (said["batch_size"], said["limited_by"]) == (128, "max_batch")


def test_plan_by_free_memory_that_is_too_little_says_both_numbers_and_ways_out():
    done = plan(*AHEAD, "--free-memory", "300MB", "--precision", "float32")
    assert done.returncode == 2
    assert "MB are required" in done.stderr and "150 MB are usable" in done.stderr
    assert "int8" in done.stderr
