"""AdamW with float32 master weights, and the learning rate of every update.

The rate, the bias corrections and the flags of an update travel to the core as one small float32 vector, so that a new
value is an input of the graph and never a new graph. The state exists, on the core, before the first step.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2 (as `torch.optim.AdamW` does it); the
rules by kind of parameter are those of the published recipe.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from xla_b2t.config import OptimizerConfig, RateConfig

Kind = Literal["day", "bias", "rest"]

# Places in the vector of an update.
RATE, DAY_RATE, CORRECTION_1, CORRECTION_2, KEEP_TOTALS = range(5)
NUM_CONTROLS = 5


def kind_of(name: str, config: OptimizerConfig) -> Kind:
    """Which rule a parameter falls under, by its name in the model."""
    if re.search(config.day_pattern, name):
        return "day"
    return "bias" if re.search(config.bias_pattern, name) else "rest"


def rate_at(step: int, rate: RateConfig) -> float:
    """Learning rate of update `step` (from 0): linear warm-up from 0, then half a cosine down to `final`."""
    if step < rate.warmup_steps:
        return rate.peak * step / max(1, rate.warmup_steps)
    if step >= rate.decay_steps:
        return rate.final
    progress = (step - rate.warmup_steps) / max(1, rate.decay_steps - rate.warmup_steps)
    return rate.final + (rate.peak - rate.final) * 0.5 * (1 + math.cos(math.pi * progress))


def controls(step: int, keep_totals: bool, config: OptimizerConfig) -> np.ndarray:
    """(NUM_CONTROLS,) float32: what differs from one update to the next.

    Args:
        step: the update, from 0.
        keep_totals: False starts the running totals of the loss anew with this update.
        config: rates and betas.
    """
    vector = np.zeros(NUM_CONTROLS, np.float32)
    vector[RATE] = rate_at(step, config.rate)
    vector[DAY_RATE] = rate_at(step, config.day_rate)
    vector[CORRECTION_1] = 1 - config.beta1 ** (step + 1)
    vector[CORRECTION_2] = 1 - config.beta2 ** (step + 1)
    vector[KEEP_TOTALS] = keep_totals
    return vector


@dataclass(frozen=True)
class Slot:
    """One parameter on the core with its state, or with this rank's part of its state.

    Attributes:
        name: its name in the model.
        kind: the rule it falls under.
        parameter: what the model computes with, in the model's dtype.
        master: float32; the weights that are trained and saved.
        moment1, moment2: float32.
    """

    name: str
    kind: Kind
    parameter: torch.Tensor
    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """The factor that brings a gradient of the global norm down to `clip_norm`; 0 clips nothing. Both 0-d, not read."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0) if clip_norm > 0 else torch.ones_like(norm)


def update(
    slots: list[Slot],
    gradients: list[torch.Tensor],
    controls_N: torch.Tensor,
    is_taken: torch.Tensor,
    config: OptimizerConfig,
) -> None:
    """One AdamW update of moments and masters, in place. The parameters are left to follow, as the masters' rounding.

    Args:
        slots: every trained parameter.
        gradients: float32, clipped, in the order and the shapes of the masters.
        controls_N: (NUM_CONTROLS,) float32 from `controls`, on the core.
        is_taken: bool, 0-d, not read; where it is False, everything stays as it is, whatever the gradients are.
        config: betas, eps, weight decays.
    """
    decay = {
        "day": config.day_weight_decay,
        "bias": config.bias_weight_decay,
        "rest": config.weight_decay,
    }
    rate = {"day": controls_N[DAY_RATE], "bias": controls_N[RATE], "rest": controls_N[RATE]}
    correction1, correction2_root = controls_N[CORRECTION_1], controls_N[CORRECTION_2].sqrt()
    for slot, gradient in zip(slots, gradients, strict=True):
        moment1 = slot.moment1 * config.beta1 + gradient * (1 - config.beta1)
        moment2 = slot.moment2 * config.beta2 + gradient.square() * (1 - config.beta2)
        root = moment2.sqrt() / correction2_root + config.eps
        step = moment1 / (root * correction1) + slot.master * decay[slot.kind]
        master = slot.master - step * rate[slot.kind]
        for held, new in ((slot.moment1, moment1), (slot.moment2, moment2), (slot.master, master)):
            held.copy_(torch.where(is_taken, new, held))
