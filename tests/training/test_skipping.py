"""Updates whose loss or gradient is not finite: left out on all ranks alike, counted, and the end of a run of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from xla_b2t.data.groups import open_group_set
from xla_b2t.training import skipping
from xla_b2t.training.totals import Totals

sys.path.insert(0, str(Path(__file__).parent))
from whole_runs import arguments, call, events, losses, make_groups, train, weights

BREAKS = """
from xla_b2t.config import decode
from xla_b2t.models.gru_decoder import GruDecoder, GruDecoderOptions


class Breaks(GruDecoder):
    'At the updates BAD it divides by nothing: on the trials of one day only, so on some of the ranks.'

    def scheduled(self, step):
        return [0.0 if step in BAD else 1.0]

    def forward(self, features_BTC, input_bins_B, days_B, scheduled_N=None):
        output = super().forward(features_BTC, input_bins_B, days_B)
        if scheduled_N is None:
            return output
        broken_B = (1 / scheduled_N[0] - 1) * (days_B == 0)
        return output._replace(logits_BPK=output.logits_BPK + broken_B[:, None, None].to(output.logits_BPK.dtype))


def build(sizes, options):
    return Breaks(sizes, decode(GruDecoderOptions, options, "options", "options"))
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return make_groups(tmp_path_factory.mktemp("one"), num_buckets=1)


def factory(folder, *bad):
    path = folder / "breaks.py"
    path.write_text(BREAKS.replace("BAD", repr(bad)))
    return [f"model.factory={path}:build", "train.global_batch=40"]  # both days are in every update


@pytest.mark.parametrize("cores", [1, 2])
def test_run_skips_an_update_that_is_not_finite_on_all_ranks_and_goes_on(groups, tmp_path, cores):
    summary = train(groups, tmp_path / "run", cores=cores, keys=factory(tmp_path, 2, 3))
    assert (summary["status"], summary["steps"], summary["skipped_updates"]) == ("completed", 6, 2)
    assert [event["step"] for event in events(tmp_path / "run") if event["kind"] == "train"] == [1, 2, 5, 6]
    assert all(np.isfinite(losses(tmp_path / "run")))
    for weight in weights(tmp_path / "run").values():
        assert weight.isfinite().all()


def test_run_without_bad_updates_has_skipped_none(groups, tmp_path):
    summary = train(groups, tmp_path / "run", keys=[*factory(tmp_path), "train.steps=2"])
    assert summary["skipped_updates"] == 0
    assert [event["skipped"] for event in events(tmp_path / "run") if event["kind"] == "train"] == [0, 0]


def test_run_of_too_many_bad_updates_ends_with_their_trials(groups, tmp_path):
    keys = [*factory(tmp_path, 2, 3, 4), "train.most_skipped_in_a_row=2"]
    done = call("train", *arguments(groups, tmp_path / "run", cores=2, keys=keys))
    assert done.returncode == 2
    assert "2 updates in a row up to step 4 had a loss or a gradient that is not finite" in done.stderr
    assert "crash/skipped.json" in done.stderr
    written = json.loads((tmp_path / "run" / "crash" / "skipped.json").read_text())
    assert [update["step"] for update in written["updates"]] == [3, 4]
    num_trials = int(open_group_set(groups).splits["train"].num_valid_G.sum())
    for update in written["updates"]:
        assert 0 < len(set(update["trials"])) == len(update["trials"]) <= num_trials
        assert all("/train/trial_" in name for name in update["trials"])


@pytest.mark.parametrize(
    ("skipped", "before", "said"),
    [
        (0, 5, ""),
        (1, 0, "1 update skipped, loss or gradient not finite"),
        (3, 1200, "3 updates skipped, loss or gradient not finite; 1,203 so far"),
    ],
)
def test_skipped_updates_are_told_with_how_many_there_were(skipped, before, said):
    assert skipping.in_words(Totals(1, 1, 1, 1, 1, skipped, 0), before) == said


@pytest.mark.parametrize("can_go_on", [True, False])
def test_too_many_skipped_updates_are_an_error_with_the_way_on(can_go_on):
    error = skipping.too_many(Totals(0, 0, 0, 0, 0, 4, 12), 40, "runs/a/crash/skipped.json", can_go_on)
    assert error.what == "12 updates in a row up to step 40 had a loss or a gradient that is not finite"
    assert error.where == "runs/a/crash/skipped.json"
    assert error.fix.startswith("look at the trials listed there; ")
    assert ("--resume" in error.fix) == can_go_on
    assert "begin anew with a lower optimizer.rate.peak" in error.fix
    assert skipping.skipped_steps(Totals(0, 0, 0, 0, 0, 4, 12), 40) == range(28, 40)
