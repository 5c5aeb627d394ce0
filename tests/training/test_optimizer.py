"""AdamW and the learning rate against torch's own, and what bf16 alone would lose."""

import math

import pytest
import torch

from xla_b2t.config import OptimizerConfig, RateConfig
from xla_b2t.training import optimizer

RATE = RateConfig(peak=5e-3, final=1e-4, warmup_steps=10, decay_steps=100)
CONFIG = OptimizerConfig(rate=RATE, day_rate=RateConfig(peak=1e-3, final=1e-4, warmup_steps=5, decay_steps=50))

TAKEN = torch.tensor(True)


def make_slots(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"gru.weight_hh_l0": (6, 4), "gru.bias_hh_l0": (6,), "day_weight": (2, 3, 3), "day_bias": (2, 3)}
    slots = []
    for name, shape in shapes.items():
        master = torch.randn(shape, generator=generator)
        kind = optimizer.kind_of(name, CONFIG)
        slots.append(
            optimizer.Slot(
                name, kind, master.to(dtype).clone(), master, torch.zeros_like(master), torch.zeros_like(master)
            )
        )
    return slots


def test_kind_of_published_names_follows_recipe():
    kinds = {
        name: optimizer.kind_of(name, CONFIG)
        for name in ("day_weight", "day_bias", "gru.bias_ih_l0", "out.bias", "gru.weight_ih_l0", "out.weight", "h0")
    }
    assert kinds == {
        "day_weight": "day",
        "day_bias": "day",
        "gru.bias_ih_l0": "bias",
        "out.bias": "bias",
        "gru.weight_ih_l0": "rest",
        "out.weight": "rest",
        "h0": "rest",
    }


def test_rate_at_each_phase_matches_closed_form():
    assert optimizer.rate_at(0, RATE) == 0
    assert optimizer.rate_at(5, RATE) == pytest.approx(2.5e-3)
    assert optimizer.rate_at(10, RATE) == pytest.approx(5e-3)
    middle = 1e-4 + (5e-3 - 1e-4) * 0.5 * (1 + math.cos(math.pi * 45 / 90))
    assert optimizer.rate_at(55, RATE) == pytest.approx(middle)
    assert optimizer.rate_at(100, RATE) == optimizer.rate_at(10**6, RATE) == 1e-4


def test_rate_at_without_warmup_begins_at_peak():
    assert optimizer.rate_at(0, RateConfig(peak=1e-3, final=0.0, warmup_steps=0, decay_steps=10)) == 1e-3


@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_update_over_steps_equals_torch_adamw(eps):
    config = OptimizerConfig(rate=CONFIG.rate, day_rate=CONFIG.day_rate, eps=eps, weight_decay=0.01)
    slots = make_slots()
    theirs = {slot.name: torch.nn.Parameter(slot.master.clone()) for slot in slots}
    groups = [
        {
            "params": [theirs[slot.name]],
            "weight_decay": 0.01 if slot.kind == "rest" else 0.0,
            "rate": config.day_rate if slot.kind == "day" else config.rate,
        }
        for slot in slots
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(config.beta1, config.beta2), eps=eps)
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        gradients = [torch.randn(slot.master.shape, generator=generator) for slot in slots]
        for slot, gradient, group in zip(slots, gradients, reference.param_groups, strict=True):
            theirs[slot.name].grad = gradient.clone()
            group["lr"] = optimizer.rate_at(step, group["rate"])
        reference.step()
        controls = torch.from_numpy(optimizer.controls(step, True, config))
        optimizer.update(slots, gradients, controls, TAKEN, config)
    for slot in slots:
        torch.testing.assert_close(slot.master, theirs[slot.name].data, rtol=2e-5, atol=1e-6)


def test_update_by_less_than_bf16_resolves_moves_float32_masters():
    config = OptimizerConfig(
        rate=RateConfig(peak=1e-4, final=1e-4, warmup_steps=0, decay_steps=1), eps=1e-8, weight_decay=0.0
    )
    master = torch.ones(3)
    slot = optimizer.Slot("w", "rest", master.bfloat16(), master, torch.zeros(3), torch.zeros(3))
    for step in range(20):
        controls = torch.from_numpy(optimizer.controls(step, True, config))
        optimizer.update([slot], [torch.full((3,), 0.1)], controls, TAKEN, config)
    # 20 steps of 1e-4 are half a unit in the last place of bf16 at 1.0: bf16 alone would still be exactly 1.
    torch.testing.assert_close(slot.master, torch.full((3,), 1 - 20e-4), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("clip", "expected"), [(10.0, 1.0), (2.5, 0.5), (0.0, 1.0)])
def test_clip_factor_of_norm_five_follows_limit(clip, expected):
    assert optimizer.clip_factor(torch.tensor(5.0), clip).item() == pytest.approx(expected, rel=1e-5)


def test_update_that_is_not_taken_leaves_everything_as_it_is_whatever_the_gradient():
    slots = make_slots()
    before = [[held.clone() for held in (slot.master, slot.moment1, slot.moment2)] for slot in slots]
    gradients = [torch.full(slot.master.shape, float("nan")) for slot in slots]
    controls = torch.from_numpy(optimizer.controls(3, True, CONFIG))
    optimizer.update(slots, gradients, controls, ~TAKEN, CONFIG)
    for slot, held in zip(slots, before, strict=True):
        for now, then in zip((slot.master, slot.moment1, slot.moment2), held, strict=True):
            assert torch.equal(now, then)
