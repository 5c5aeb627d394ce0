"""What ranks do in the tests of sharded state: a target must be importable by another process."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from test_step import BINS, CLASSES, FEATURES, KEYS, TRIALS, Small, Tied, host_batch

from xla_b2t import config as configuration
from xla_b2t.training.agreement import check_same_weights
from xla_b2t.training.step import TrainState, TrainStep
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import to_device, to_host
from xla_b2t.xla.feed import DeviceBatch, as_tensors

NUM_BATCHES = 6  # an update, over all ranks


class Odd(Small):
    """Has tied weights, a frozen one, a scalar, and sizes that few numbers divide."""

    def __init__(self):
        super().__init__(extra=Tied())
        self.extra.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features_BTC, input_bins_B, days_B):
        return super().forward(features_BTC * self.scale, input_bins_B, days_B)


def train(world, output, keys, resumed_from, num_steps):
    """Trains on from a file, or anew, and writes a file of the same kind: the state, and what the ranks found."""
    accumulation = NUM_BATCHES // world.size
    config = configuration.load(None, [*KEYS, f"train.accumulation={accumulation}", *keys])
    torch.manual_seed(0)
    model, first, state = Odd(), 0, None
    if resumed_from:
        saved = torch.load(resumed_from, weights_only=True)
        first, state = saved["steps"], TrainState(**saved["state"])
    guard = CompileGuard()
    step = TrainStep(model, CLASSES, config, world, guard, state)
    norms = []
    for number in range(first, first + num_steps):
        seeds = [100 * number + world.size * micro_step + world.rank for micro_step in range(accumulation)]
        batches = [DeviceBatch(*to_device(list(as_tensors(make_batch(seed))))) for seed in seeds]
        step.run(number, 0, iter(batches))
        norms.append(step.totals().mean_norm)
    names = [name for name, _ in model.named_parameters()]
    parameters = to_host([parameter.detach() for parameter in model.parameters()])
    check_same_weights({name: p.float() for name, p in zip(names, parameters, strict=True)}, world)
    held = [getattr(slot, column).numel() for slot in step.slots for column in ("master", "moment1", "moment2")]
    state = step.state()
    assert (state is None) == (world.rank != 0)
    if state is not None:
        counts = guard.compiles, guard.compiles_after_warmup, guard.host_fallbacks
        values = {"steps": first + num_steps, "state": vars(state), "held": held, "norms": norms, "counts": counts}
        torch.save(values | {"parameters": dict(zip(names, parameters, strict=True))}, output)


def make_batch(seed):
    """A batch of its own features."""
    batch = host_batch()
    features = torch.randn(TRIALS, BINS, FEATURES, generator=torch.Generator().manual_seed(seed)).bfloat16()
    batch.features_BTC[:] = features.view(torch.uint16).numpy()
    return batch
