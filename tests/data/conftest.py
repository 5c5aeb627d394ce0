"""A small simulated participant and its groups, and a way to write trial files by hand."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from xla_b2t.data.prebatch import PrebatchReport, PrebatchSettings, prebatch
from xla_b2t.data.synth import SynthSettings, synthesize

SYNTH = SynthSettings(
    sessions=2, trials=21, held_out_share=0.5, features=16, seed=3, bins_per_phoneme=3, silence_bins=6
)
PREBATCH = PrebatchSettings(group_size=4, num_buckets=3, patch_bins=4, patch_stride=2)


@pytest.fixture(scope="session")
def simulation(tmp_path_factory) -> Path:
    """Folder of a simulated participant made with `SYNTH`."""
    folder = tmp_path_factory.mktemp("simulation") / "trials"
    synthesize(folder, SYNTH)
    return folder


@pytest.fixture(scope="session")
def conversion(simulation, tmp_path_factory) -> PrebatchReport:
    """The simulation pre-batched with `PREBATCH`. Do not write to its folder."""
    return prebatch(simulation, tmp_path_factory.mktemp("conversion") / "groups", PREBATCH)


@pytest.fixture
def write_trials(tmp_path) -> Callable[..., Path]:
    """Writes one file of hand-made trials and returns the source folder."""

    def write(*trials: dict, session: str = "t15.2023.08.11", split: str = "train") -> Path:
        """Each trial: `features`, and optionally `labels`, `seq_len`, `n_time_steps`, `leave_out`, `name`."""
        folder = tmp_path / "source" / session
        folder.mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / f"data_{split}.hdf5", "w") as file:
            for number, trial in enumerate(trials):
                node = file.create_group(trial.get("name", f"trial_{number:04d}"))
                features = np.asarray(trial.get("features", np.zeros((40, 8), np.float32)))
                labels = trial.get("labels", None if split == "test" else [7, 28, 17, 40])
                leave_out = trial.get("leave_out", ())
                if "input_features" not in leave_out:
                    node["input_features"] = features
                if "n_time_steps" not in leave_out:
                    node.attrs["n_time_steps"] = trial.get("n_time_steps", len(features))
                if "block_num" in trial:
                    node.attrs["block_num"] = trial["block_num"]
                if labels is None:
                    continue
                labels = np.asarray(labels)
                if "seq_class_ids" not in leave_out:
                    node["seq_class_ids"] = np.pad(labels, (0, 20 - len(labels))) if labels.ndim == 1 else labels
                if "seq_len" not in leave_out:
                    node.attrs["seq_len"] = trial.get("seq_len", len(labels))
        return tmp_path / "source"

    return write
