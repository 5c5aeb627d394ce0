"""Looks at models of the corpus as a preflight does, one after the other: a line of JSON on stdout for each.

In: names of models, a file of the corpus such as `broken/late_cast.py`, the absolute path of another file, which is
looked at in two buckets, or `model NAME` for one of ours. To be started
in the folder of the corpus, under `xla_b2t.xla.trace_environment.ENVIRONMENT`. A model that ends the process has no
line, nor have those after it.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from msgspec.structs import replace

from xla_b2t import config as configuration
from xla_b2t.audit import stored
from xla_b2t.audit.child import told_once
from xla_b2t.audit.construction import construct
from xla_b2t.audit.rehearsal import rehearse
from xla_b2t.config import ModelConfig
from xla_b2t.data.groups import Bucket
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.shapes import Shapes

SIZES = Sizes(num_features=12, num_days=3, num_classes=41)
BUCKETS = (Bucket(40, 10), Bucket(60, 12))
OURS = {"hidden": 16, "layers": 2, "patch_bins": 4, "patch_stride": 2}
OPTIONS = {
    "gru_decoder": OURS,
    "noise_split": {"patch_bins": 4, "patch_stride": 2},
}


def named(name: str) -> ModelConfig:
    """The `[model]` of a configuration."""
    if name.startswith("model "):
        ours = name.removeprefix("model ")
        return ModelConfig(name=ours, options=OPTIONS[ours])
    return ModelConfig(factory=f"{name}:build")


def look(name: str) -> dict:
    """What a preflight finds, and how much it looked at; or how it failed."""
    config = replace(configuration.load(None, ["train.batch_size=4"]), model=named(name))
    try:
        made = construct(config.model, SIZES)
        arrived = stored.arrival(made, config)
        # What is the same in every bucket is seen in one.
        buckets = BUCKETS if Path(name).is_absolute() else BUCKETS[:1]
        rehearsed = rehearse(made, config, Shapes(SIZES, buckets, num_ranks=2, trials=4, validation_trials=4))
    except BaseException:
        return {"error": traceback.format_exc()}
    found = told_once(arrived, rehearsed.findings)
    return {"findings": [asdict(finding) for finding in found], "checked": rehearsed.checked}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"model": name, **look(name)}), flush=True)
