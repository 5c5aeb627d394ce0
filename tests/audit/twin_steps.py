"""What a child process does with the models of the corpus that are right, and with ours: trains each, or traces each.

Usage: twin_steps.py train|trace FOLDER
Each writes a line of `results.jsonl` for every model into the folder, and before it the name at hand to `at.txt`, in
case the process dies of it. `trace` puts the programs beside.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from xla_b2t import config as configuration
from xla_b2t.data.groups import Batch
from xla_b2t.models.build import build_model, build_without_weights
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.step import TrainStep
from xla_b2t.training.traced import blank_batch, trace_train_step
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import to_device, to_host
from xla_b2t.xla.feed import DeviceBatch, as_tensors
from xla_b2t.xla.world import Alone

CORPUS = Path(__file__).parent / "corpus"
SIZES = Sizes(num_features=12, num_days=3, num_classes=41)
TRIALS, BINS, LABELS, CORES = 4, 40, 10, 8
OURS = {
    "ours/gru_decoder": ["model.options={ hidden = 128, layers = 2, patch_bins = 4, patch_stride = 4 }"],
    "ours/noise_split": [
        "model.name=noise_split",
        "model.options={ hidden = 128, noise_layers = 1, clean_layers = 1, noisy_layers = 1, patch_bins = 4, "
        "patch_stride = 4 }",
    ],
}
"""Sizes that the GRU kernel of a TPU takes."""
NAMES = [f"{folder}/{path.stem}" for folder in ("clean", "modules") for path in sorted((CORPUS / folder).glob("*.py"))]
NAMES += OURS
AT_ONCE = ["optimizer.eps=1e-6"] + [
    f"optimizer.{rate}={{ peak = 1e-2, final = 1e-2, warmup_steps = 0, decay_steps = 1 }}"
    for rate in ("rate", "day_rate")
]
"""The first update moves every weight."""
QUIET = [
    *("augment.white_noise_std=0", "augment.constant_offset_std=0"),
    *("augment.start_shift_bins=0", "augment.smooth_sigma_bins=0"),
]
"""Noise and smoothing come before any model, and are half of what there is to compile: ours alone are given them."""


def config_of(name):
    keys = OURS.get(name) or [f"model.factory={CORPUS / name}.py:build", *QUIET]
    return configuration.load(None, [*keys, *AT_ONCE])


def host_batch(number):
    """Four trials, the last an empty slot; nothing but the shapes is the same for another number."""
    lengths = [np.array(each, np.int32) for each in ([40, 35, 24, 0], [31, 22, 40, 0])]
    valid_B = np.array([True, True, True, False])
    labels = [np.array(each, np.int32) for each in ([3, 2, 1, 0], [2, 1, 4, 0])]
    features = torch.randn(TRIALS, BINS, SIZES.num_features, generator=torch.Generator().manual_seed(number)).bfloat16()
    features[~torch.from_numpy(valid_B)] = 0
    slots_L = np.arange(LABELS)
    return Batch(
        features_BTC=features.view(torch.uint16).numpy(),
        input_bins_B=lengths[number],
        labels_BL=np.where(slots_L < labels[number][:, None], 1 + 3 * slots_L + number, 0).astype(np.int32),
        label_lengths_B=labels[number],
        required_steps_B=labels[number],
        days_B=np.array([[0, 2, 1, 0], [2, 2, 0, 0]][number], np.int32),
        valid_B=valid_B,
        trial_ids=("",) * TRIALS,
    )


def train(name):
    """Two updates on unlike batches: what came of them."""
    guard = CompileGuard()
    config = config_of(name)
    model = build_model(config.model, SIZES, seed=1)
    step = TrainStep(model, SIZES.num_classes, config, Alone("cpu"), guard)
    before = to_host([slot.master for slot in step.slots])
    for number in range(2):
        step.run(number, 0, iter([DeviceBatch(*to_device(list(as_tensors(host_batch(number)))))]))
    totals, after = step.totals(), to_host([slot.master for slot in step.slots])
    return {
        "objective": totals.mean_objective,
        "norm": totals.mean_norm,
        "updates": totals.updates,
        "trials": totals.trials,
        "unfinite": [slot.name for slot, now in zip(step.slots, after, strict=True) if not now.isfinite().all()],
        "unmoved": [slot.name for slot, a, b in zip(step.slots, before, after, strict=True) if torch.equal(a, b)],
        "compiles": guard.compiles,
        "compiles_after_warmup": guard.compiles_after_warmup,
        "host_fallbacks": guard.host_fallbacks,
    }


def trace(name, folder):
    """The program of an update on eight cores."""
    config = config_of(name)
    model = build_without_weights(config.model, SIZES)
    batch = blank_batch(TRIALS, BINS, SIZES.num_features, LABELS)
    path = folder / f"{name.replace('/', '_')}.hlo"
    path.write_bytes(trace_train_step(model, SIZES.num_classes, config, CORES, batch))
    return {"program": str(path)}


def main(what, folder):
    for name in NAMES:
        (folder / "at.txt").write_text(name)
        try:
            result = train(name) if what == "train" else trace(name, folder)
        except Exception as error:  # the others are to be seen too
            result = {"error": f"{type(error).__name__}: {error}"}
        with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **result}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
