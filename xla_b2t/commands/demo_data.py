"""The demo's data: a simulated participant, and groups of it, made once.

In: the folder that the demo's configuration names. Out: groups there, and the trials they are of beside it. These are
`xla_b2t synth` and `xla_b2t prebatch` with the settings below.
"""

import sys
from pathlib import Path

from xla_b2t.commands.progress import shown_progress
from xla_b2t.data.groups import read_manifest
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError

SYNTH = SynthSettings(sessions=4, trials=192, features=64, seed=1, bins_per_phoneme=6.0, signal=0.4, overwrite=True)
PREBATCH = PrebatchSettings(num_buckets=4, patch_bins=8, patch_stride=4, overwrite=True)


def make_demo_data(groups_dir: Path) -> None:
    """Simulates and pre-batches, unless the groups are there, in the format of this version."""
    try:
        read_manifest(groups_dir)
        return
    except UserError:
        pass  # none yet, or of another version: they are ours to make again
    trials_dir = groups_dir.parent / "trials"
    print(f"no data yet: simulating a participant in {trials_dir}, pre-batching to {groups_dir}", file=sys.stderr)
    with shown_progress() as progress:
        synthesize(trials_dir, SYNTH, progress)
        prebatch(trials_dir, groups_dir, PREBATCH, progress)
