"""Damaged sources and groups: every one of them ends in a clear error, a counted refusal, or the same data."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from damage_outcome import outcome_of_groups, outcome_of_source

from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize

SYNTH = SynthSettings(sessions=2, trials=7, held_out_share=0.4, features=8, seed=5, bins_per_phoneme=3)
SETTINGS = PrebatchSettings(group_size=2, num_buckets=2, patch_bins=4, patch_stride=2)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "trials"
    synthesize(folder, SYNTH)
    return folder


@pytest.fixture(scope="session")
def groups(source):
    return Path(prebatch(source, source.parent / "groups", SETTINGS).folder)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_source_is_refused_or_counted_and_what_is_kept_is_as_it_was(source, tmp_path, seed):
    assert outcome_of_source(source, SETTINGS, seed, tmp_path).said


@pytest.mark.parametrize("seed", range(120))
def test_damaged_groups_are_refused_or_read_as_they_were(groups, tmp_path, seed):
    assert outcome_of_groups(groups, seed, tmp_path).said
