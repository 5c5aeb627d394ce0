"""The whole training step as a program: what a core will be given, without data, weights or a TPU.

In: a model on the `meta` device, the configuration, the number of cores and a batch's shape. Out: an HLO module for
`xla/tpu_compiler.py`. Nothing is run and no memory is taken, so a model of any size is traced in seconds.
"""

import os

import torch
from torch import nn

from xla_b2t.config import Config
from xla_b2t.models.protocol import scheduled_numbers
from xla_b2t.training import optimizer
from xla_b2t.training.step import TrainStep
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.feed import DeviceBatch
from xla_b2t.xla.target import V5E, tracing_for
from xla_b2t.xla.trace import TracedWorld, no_execution, placeholders, trace

# Read by torch_xla when it is imported: reductions stay in the graph of a single process, and operations know the
# Python line they come from.
ENVIRONMENT = {"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1", "XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"}


def trace_train_step(model: nn.Module, num_classes: int, config: Config, num_ranks: int, batch: DeviceBatch) -> bytes:
    """An update without accumulation: forward, loss, backward, reduction over the cores, clipping, update.

    The process must have been started with `ENVIRONMENT`.

    Args:
        model: a decoder on the `meta` device.
        num_classes: K of its logits.
        config: the run's configuration, without accumulation.
        num_ranks: cores that train together.
        batch: from `blank_batch`.

    Returns:
        A serialised HloModuleProto.
    """
    missing = {name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    assert not missing, f"set before the process starts: {missing}"
    assert config.train.accumulation == 1, "with accumulation an update is two programs"
    with no_execution(), tracing_for(V5E):
        step = TrainStep(model, num_classes, config, TracedWorld(num_ranks), CompileGuard(), place=placeholders)
        inputs = DeviceBatch(*placeholders(list(batch)))
        numbers = [torch.empty(optimizer.NUM_CONTROLS, device="meta"), *scheduled_numbers(model, 0)]
        controls_N, *scheduled = placeholders(numbers)
        return trace(step.tensors(), lambda: step.trace(inputs, controls_N, scheduled))


def blank_batch(trials: int, bins: int, features: int, labels: int) -> DeviceBatch:
    """A core's batch of these sizes on the `meta` device."""
    with torch.device("meta"):
        counts = [torch.empty(trials, dtype=torch.int32) for _ in range(4)]
        return DeviceBatch(
            features_BTC=torch.empty(trials, bins, features, dtype=torch.bfloat16),
            input_bins_B=counts[0],
            labels_BL=torch.empty(trials, labels, dtype=torch.int32),
            label_lengths_B=counts[1],
            required_steps_B=counts[2],
            days_B=counts[3],
            valid_B=torch.empty(trials, dtype=torch.bool),
        )
