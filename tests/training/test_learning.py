"""A decoder learns held-out sentences from the features, and not when the labels belong to other trials."""

import json
import shutil

import h5py
import numpy as np
import pytest

from xla_b2t import config as configuration
from xla_b2t.commands.evaluate import EvaluationJob, evaluate_rank
from xla_b2t.config import DataConfig
from xla_b2t.data.prebatch import PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize
from xla_b2t.errors import UserError
from xla_b2t.evaluation.per import score, total
from xla_b2t.training.checkpoint import CheckpointFolder
from xla_b2t.training.loop import Job, run_rank
from xla_b2t.xla.world import Alone

KEYS = [
    "model.options.patch_bins=4", "model.options.patch_stride=2", "model.options.hidden=64",
    "model.options.dropout=0.0", "model.options.input_dropout=0.1", "model.dtype=float32",
    "augment.white_noise_std=0.3", "augment.constant_offset_std=0.1", "augment.smooth_sigma_bins=1.0",
    "optimizer.eps=1e-8", "optimizer.rate={ peak = 1e-2, final = 1e-4, warmup_steps = 10, decay_steps = 110 }",
    "optimizer.day_rate={ peak = 2e-3, final = 1e-4, warmup_steps = 10, decay_steps = 110 }",
    "train.global_batch=16", "train.steps=110", "train.log_every=50", "validation.every=110",
]  # fmt: skip
ONE_LAYER = ["model.options.layers=1"]
NOISE_SPLIT = [
    "model.name=noise_split", "model.options.patch_bins=2", "model.options.noise_layers=1",
    "model.options.clean_layers=1", "model.options.noisy_layers=1", "model.options.reversal_ramp_steps=25",
    "train.steps=50", "validation.every=50", "train.log_every=25",
]  # fmt: skip


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning") / "trials"
    settings = SynthSettings(
        sessions=2, trials=160, features=64, seed=2, bins_per_phoneme=4.0, silence_bins=4.0, signal=0.8, drift=0.1
    )
    synthesize(folder, settings)
    return folder


def held_out_rate(trials, folder, keys=ONE_LAYER):
    """Trains and returns the best phoneme error rate on the held-out sentences."""
    prebatch(trials, folder / "groups", PrebatchSettings(num_buckets=1, patch_bins=4, patch_stride=2))
    config = configuration.load(None, [*KEYS, *keys, f"data.dir={folder}/groups", f"run.dir={folder}/run"])
    run_rank(Alone("cpu"), Job(config, checkpoint="", allow_recompile=False, seconds={}, started=0.0))
    return json.loads((folder / "run" / "summary.json").read_text())["best_val_per"]


def shuffle_labels(folder, seed):
    """Gives each training trial the labels of another of about the same length, so that none becomes impossible."""
    generator = np.random.default_rng(seed)
    for path in sorted(folder.glob("*/data_train.hdf5")):
        with h5py.File(path, "r+") as file:
            names = sorted(file, key=lambda name: file[name].attrs["seq_len"])
            labels = {name: (file[name]["seq_class_ids"][()], file[name].attrs["seq_len"]) for name in names}
            for start in range(0, len(names), 12):
                some = names[start : start + 12]
                for name, other in zip(some, generator.permutation(some), strict=True):
                    file[name]["seq_class_ids"][...] = labels[other][0]
                    file[name].attrs["seq_len"] = labels[other][1]


def test_training_reaches_held_out_sentences(xla_device, trials, tmp_path):
    assert held_out_rate(trials, tmp_path) < 0.2


def test_training_on_shuffled_labels_does_not(xla_device, trials, tmp_path):
    shutil.copytree(trials, tmp_path / "trials")
    shuffle_labels(tmp_path / "trials", seed=1)
    assert held_out_rate(tmp_path / "trials", tmp_path) > 0.6


def rate_of_head(folder, head):
    """Decodes the held-out sentences with the best checkpoint and a head."""
    checkpoint, _ = CheckpointFolder(folder / "run").find("best")
    job = EvaluationJob(
        checkpoint=str(checkpoint),
        data=DataConfig(dir=f"{folder}/groups"),
        split="val",
        output_dir=str(folder),
        batch_size=64,
        allow_recompile=False,
        head=head,
        no_kernel=False,
    )
    evaluate_rank(Alone("cpu"), job)
    lines = map(json.loads, (folder / "rank-0.jsonl").read_text().splitlines())
    return total(score((line["session"], line["reference"], line["decoded"]) for line in lines)).per


def test_training_of_noise_split_leaves_less_of_the_phonemes_in_the_noise(xla_device, trials, tmp_path):
    rate = held_out_rate(trials, tmp_path, NOISE_SPLIT)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train_loss_last"] < summary["train_loss_first"]
    assert rate_of_head(tmp_path, "") == rate < 0.3
    assert rate_of_head(tmp_path, "noisy") > 0.6
    with pytest.raises(UserError, match="there is no auxiliary head 'loud'; known: noisy"):
        rate_of_head(tmp_path, "loud")
