"""Numbers that a model schedules reach every micro-step of an update, and never make a new graph."""

import numpy as np
import pytest
import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.config import ModelConfig
from xla_b2t.data.groups import Batch
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import DecoderOutput, Sizes
from xla_b2t.training.step import TrainStep, initial_state
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import to_device
from xla_b2t.xla.feed import DeviceBatch, as_tensors
from xla_b2t.xla.world import Alone

TRIALS, FEATURES, CLASSES = 4, 6, 5
OPTIONS = {
    "patch_bins": 2, "patch_stride": 2, "hidden": 8, "noise_layers": 1, "clean_layers": 1, "noisy_layers": 1,
    "reversal_ramp_steps": 4,
}  # fmt: skip
QUIET = ["augment.white_noise_std=0", "augment.constant_offset_std=0", "augment.start_shift_bins=0"]
KEYS = ["optimizer.eps=1e-6", "optimizer.rate={ peak = 1e-2, final = 1e-2, warmup_steps = 0, decay_steps = 1 }"]


class Paced(nn.Module):
    """Adds a loss whose gradient by `paced` is the number of the update, which is the step itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.paced = nn.Parameter(torch.zeros(()))

    def forward(self, features_BTC, input_bins_B, days_B, scheduled_N=None):
        loss = self.paced.float() * scheduled_N[0]
        return DecoderOutput(self.head(features_BTC), input_bins_B.clamp(min=1), loss.expand(len(days_B)))

    def output_steps(self, input_bins):
        return max(input_bins, 1)

    def scheduled(self, step):
        return [float(step)]


def device_batch(bins):
    features = torch.randn(TRIALS, bins, FEATURES, generator=torch.Generator().manual_seed(bins)).bfloat16()
    batch = Batch(
        features_BTC=features.view(torch.uint16).numpy(),
        input_bins_B=np.full(TRIALS, bins, np.int32),
        labels_BL=np.tile(np.array([1, 3, 0, 0], np.int32), (TRIALS, 1)),
        label_lengths_B=np.full(TRIALS, 2, np.int32),
        required_steps_B=np.full(TRIALS, 2, np.int32),
        days_B=np.zeros(TRIALS, np.int32),
        valid_B=np.full(TRIALS, True),
        trial_ids=("",) * TRIALS,
    )
    return DeviceBatch(*to_device(list(as_tensors(batch))))


def make(model, *keys, guard=None, state=None):
    config = configuration.load(None, [*KEYS, *keys])
    return TrainStep(model, CLASSES, config, Alone("cpu"), guard or CompileGuard(), state)


def noise_split(**changes):
    return build_model(ModelConfig(name="noise_split", options=OPTIONS | changes), Sizes(FEATURES, 2, CLASSES), seed=1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_scheduled_number_is_the_same_in_every_micro_step(xla_device, accumulation):
    step = make(Paced(), f"train.accumulation={accumulation}", *QUIET, "optimizer.clip_norm=0", "model.dtype=float32")
    for number in range(3):
        step.run(number, 0, iter([device_batch(12)] * accumulation))
    # beta1 is 0.9, and the gradients were 0, 1 and 2.
    assert step.state().moment1["paced"].item() == pytest.approx(0.1 * (0.9 * 1 + 2), rel=1e-5)


class Growing(Paced):
    """Schedules one number more in every update."""

    def scheduled(self, step):
        return [0.5] * (step + 1)


def test_step_of_a_schedule_that_grows_says_so(xla_device):
    step = make(Growing(), *QUIET)
    step.run(2, 0, iter([device_batch(12)]))
    with pytest.raises(UserError) as caught:
        step.run(3, 0, iter([device_batch(12)]))
    assert caught.value.what == "scheduled(3) gave 4 numbers, at the updates before 3"
    assert caught.value.where == "scheduled of Growing"
    assert "as many at every step" in caught.value.fix


def test_step_of_noise_split_compiles_once_a_bucket_while_its_strength_rises(xla_device):
    guard, model = CompileGuard(), noise_split(dropout=0.0, input_dropout=0.0)
    step = make(model, *QUIET, "train.accumulation=2", guard=guard)
    for number in range(6):
        step.run(number, number % 2, iter([device_batch((12, 16)[number % 2])] * 2))
    assert len({tuple(model.scheduled(number)) for number in range(6)}) == 5
    two_buckets_and_applying = 3
    assert (guard.compiles, guard.compiles_after_warmup, guard.host_fallbacks) == (two_buckets_and_applying, 0, 0)


def test_step_of_noise_split_resumed_equals_the_uninterrupted_one(xla_device):
    start = initial_state(noise_split())
    whole = make(noise_split(), state=start)
    for number in range(4):
        whole.run(number, 0, iter([device_batch(12)]))
    state = start
    for first in (0, 2):
        part = make(noise_split(), state=state)
        for number in (first, first + 1):
            part.run(number, 0, iter([device_batch(12)]))
        state = part.state()
    for name, weight in whole.state().weights.items():
        assert torch.equal(weight, state.weights[name]), name
