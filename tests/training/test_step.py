"""What a step does to the parameters of all kinds of models, on one rank."""

import numpy as np
import pytest
import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.data.groups import Batch
from xla_b2t.errors import UserError
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput
from xla_b2t.training import step as training_step
from xla_b2t.training.step import TrainStep, initial_state
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import to_device
from xla_b2t.xla.feed import DeviceBatch, as_tensors
from xla_b2t.xla.world import Alone

TRIALS, BINS, FEATURES, CLASSES = 4, 12, 6, 5
KEYS = [
    "augment.white_noise_std=0", "augment.constant_offset_std=0", "augment.start_shift_bins=0", "optimizer.eps=1e-6",
    "optimizer.rate={ peak = 1e-2, final = 1e-2, warmup_steps = 0, decay_steps = 1 }",
]  # fmt: skip


class Small(nn.Module):
    """A decoder with one step a bin; `extra` stands between features and head."""

    def __init__(self, extra=None):
        super().__init__()
        self.extra = extra or nn.Identity()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, features_BTC, input_bins_B, days_B):
        return DecoderOutput(self.head(self.extra(features_BTC)), input_bins_B.clamp(min=1))

    def output_steps(self, input_bins):
        return max(input_bins, 1)


def host_batch(valid=(True,) * TRIALS):
    features = torch.randn(TRIALS, BINS, FEATURES, generator=torch.Generator().manual_seed(0)).bfloat16()
    valid_B = np.array(valid)
    ones_B = valid_B.astype(np.int32)
    return Batch(
        features_BTC=features.view(torch.uint16).numpy(),
        input_bins_B=np.array([12, 10, 8, 6], np.int32) * ones_B,
        labels_BL=np.tile(np.array([1, 3, 0, 0], np.int32), (TRIALS, 1)) * ones_B[:, None],
        label_lengths_B=2 * ones_B,
        required_steps_B=2 * ones_B,
        days_B=np.zeros(TRIALS, np.int32),
        valid_B=valid_B,
        trial_ids=("",) * TRIALS,
    )


def run(step, number=0, batch=None):
    there = DeviceBatch(*to_device(list(as_tensors(batch or host_batch()))))
    step.run(number, 0, iter([there]))


def make(model, *keys, state=None):
    config = configuration.load(None, [*KEYS, *keys])
    return TrainStep(model, CLASSES, config, Alone("cpu"), CompileGuard(), state)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_step_keeps_masters_and_moments_float32_and_parameters_in_dtype(xla_device, dtype):
    step = make(Small(), f"model.dtype={dtype}")
    for number in range(3):
        run(step, number)
    for slot in step.slots:
        assert {slot.master.dtype, slot.moment1.dtype, slot.moment2.dtype} == {torch.float32}
        assert slot.parameter.dtype == getattr(torch, dtype)
        torch.testing.assert_close(slot.parameter.cpu(), slot.master.cpu().to(slot.parameter.dtype), rtol=0, atol=0)


def test_step_with_empty_slots_equals_one_without_them(xla_device):
    torch.manual_seed(0)
    state = initial_state(Small())
    part, whole = make(Small(), "model.dtype=float32", state=state), make(Small(), "model.dtype=float32", state=state)
    run(part, batch=host_batch((True, True, False, False)))
    twice = host_batch()
    for name in ("features_BTC", "input_bins_B"):
        getattr(twice, name)[2:] = getattr(twice, name)[:2]
    run(whole, batch=twice)
    found, expected = part.totals(), whole.totals()
    assert (found.trials, expected.trials) == (2, 4)
    assert found.mean_loss == pytest.approx(expected.mean_loss, rel=1e-6)
    for name, weight in part.state().weights.items():
        torch.testing.assert_close(weight, whole.state().weights[name], rtol=1e-5, atol=1e-7)


class Weighted(Small):
    """Half of the main loss, three times a head of the same scores, and 2 for each trial."""

    def forward(self, features_BTC, input_bins_B, days_B):
        logits_BPK, steps_B, *_ = super().forward(features_BTC, input_bins_B, days_B)
        own_B = torch.full(input_bins_B.shape, 2.0, device=logits_BPK.device)
        return DecoderOutput(logits_BPK, steps_B, own_B, (AuxiliaryHead("again", logits_BPK, 3.0),), 0.5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_step_tells_the_main_loss_from_what_it_minimises(xla_device, accumulation):
    torch.manual_seed(0)
    state = initial_state(Small())
    keys = ["model.dtype=float32", f"train.accumulation={accumulation}"]
    plain, weighted = make(Small(), *keys, state=state), make(Weighted(), *keys, state=state)
    for step in (plain, weighted):
        batches = [DeviceBatch(*to_device(list(as_tensors(host_batch())))) for _ in range(accumulation)]
        step.run(0, 0, iter(batches))
    expected, found = plain.totals(), weighted.totals()
    assert expected.mean_objective == expected.mean_loss
    assert found.mean_loss == pytest.approx(expected.mean_loss, rel=1e-6)
    assert found.mean_objective == pytest.approx(3.5 * expected.mean_loss + 2, rel=1e-6)
    assert found.mean_norm == pytest.approx(3.5 * expected.mean_norm, rel=1e-5)


def test_step_leaves_frozen_parameters_and_keeps_them_in_the_state(xla_device):
    model = Small(extra=nn.Linear(FEATURES, FEATURES))
    model.extra.weight.requires_grad_(False)
    before = model.extra.weight.clone()
    step = make(model, "model.dtype=float32")
    run(step)
    state = step.state()
    assert "extra.weight" not in state.weights
    torch.testing.assert_close(state.fixed["extra.weight"], before, rtol=0, atol=0)
    again = Small(extra=nn.Linear(FEATURES, FEATURES))
    again.extra.weight.requires_grad_(False)
    make(again, "model.dtype=float32", state=state)
    torch.testing.assert_close(again.extra.weight.cpu(), before, rtol=0, atol=0)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_skips_an_update_that_is_not_finite_and_the_next_is_as_if_it_had_not_been(xla_device, accumulation, value):
    torch.manual_seed(0)
    state = initial_state(Small())
    keys = ["model.dtype=float32", f"train.accumulation={accumulation}"]
    plain, skips = make(Small(), *keys, state=state), make(Small(), *keys, state=state)
    bad = host_batch()
    bad.features_BTC[1, 0, 0] = torch.tensor(value).bfloat16().view(torch.int16).item()
    for number, first in enumerate((host_batch(), bad, host_batch())):
        for step in (plain, skips):
            if step is plain and first is bad:
                continue
            batches = [first, *[host_batch()] * (accumulation - 1)]
            step.run(number, 0, iter([DeviceBatch(*to_device(list(as_tensors(batch)))) for batch in batches]))
        if first is bad:
            assert skips.totals().skipped_in_a_row == 1
    found = skips.totals()
    assert (found.skipped, found.skipped_in_a_row, found.updates) == (0, 0, 1)
    assert np.isfinite(found.mean_loss)
    for column in ("weights", "moment1", "moment2"):
        for name, tensor in getattr(skips.state(), column).items():
            assert torch.equal(tensor, getattr(plain.state(), column)[name]), (column, name)


class Tied(nn.Module):
    """Uses one weight under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_step_keeps_tied_weights_tied(xla_device):
    model = Small(extra=Tied())
    step = make(model, "model.dtype=float32")
    for number in range(3):
        run(step, number)
    assert model.extra.first.weight is model.extra.second.weight
    assert [name for name in step.state().weights if "weight" in name] == ["extra.first.weight", "head.weight"]


def test_step_places_parameters_where_torch_gru_finds_them(xla_device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(FEATURES, FEATURES)

        def forward(self, x):
            return self.gru(x.transpose(0, 1))[0].transpose(0, 1)

    model = Small(extra=Recurrent())
    run(make(model, "model.dtype=bfloat16"))
    assert {weight.dtype for weight in model.extra.gru._flat_weights} == {torch.bfloat16}


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_step_keeps_an_empty_parameter_as_it_is(xla_device, sharded):
    class WithEmpty(Small):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.empty(0))

        def forward(self, features_BTC, input_bins_B, days_B):
            return super().forward(features_BTC + self.spare.sum(), input_bins_B, days_B)

    step = make(WithEmpty(), f"optimizer.sharded={sharded}")
    run(step)
    assert np.isfinite(step.totals().mean_norm)
    assert step.state().weights["spare"].shape == (0,)


class Normed(nn.Module):
    """Keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def test_step_that_changes_a_buffer_is_refused(xla_device):
    with pytest.raises(UserError) as caught:
        run(make(Small(extra=Normed())))
    assert "changes the buffer extra.norm.running_mean" in caught.value.what
    assert "LayerNorm" in caught.value.fix


def test_step_that_does_not_reach_a_parameter_names_it(xla_device):
    model = Small()
    model.unused = nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError) as caught:
        run(make(model))
    assert caught.value.what == "the loss does not depend on the parameter unused"
    assert "requires_grad=False" in caught.value.fix


@pytest.mark.parametrize(("name", "calls"), [("sync", 3), ("to_host", 1)])
def test_step_out_of_hbm_in_its_update_says_what_helps_and_not_a_smaller_batch(xla_device, monkeypatch, name, calls):
    step = make(Small(), "train.accumulation=2")
    real, done = getattr(training_step, name), []

    def refused(*arguments):
        done.append(arguments)
        if len(done) == calls:
            raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2G of 1G hbm.")
        return real(*arguments)

    monkeypatch.setattr(training_step, name, refused)
    there = [DeviceBatch(*to_device(list(as_tensors(host_batch())))) for _ in range(2)]
    with pytest.raises(UserError) as caught:
        step.run(6, 0, iter(there))
    what, where, fix = caught.value.what, caught.value.where, caught.value.fix
    assert what.startswith("out of HBM, in the update of the parameters, which takes as much with a smaller batch: Ran")
    assert where == "step 7, its update"
    assert fix.startswith("train fewer parameters") and fix.endswith("xla_b2t plan-memory")


class Wrong(Small):
    """Breaks the protocol in the way that is asked for."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, features_BTC, input_bins_B, days_B):
        logits, steps, *_ = super().forward(features_BTC, input_bins_B, days_B)
        return {
            "tuple": (logits, steps),
            "flat": DecoderOutput(logits[:, 0], steps),
            "wide": DecoderOutput(logits.float(), steps),
            "steps": DecoderOutput(logits, steps.float()),
            "fewer": DecoderOutput(logits[:, 1:], steps),
            "classes": DecoderOutput(logits[:, :, 1:], steps),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("tuple", "it returned tuple, expected DecoderOutput"),
        ("flat", "logits are (4, 5), expected (4, steps, 5)"),
        ("wide", "logits are torch.float32 for features in torch.bfloat16"),
        ("steps", "steps are torch.float32 (4,), expected torch.int32 (4,)"),
        ("classes", "logits are (4, 12, 4), expected (4, steps, 5)"),
        ("fewer", "12 bins gave logits of 11 steps, output_steps(12) is 12"),
    ],
)
def test_step_of_model_that_breaks_the_protocol_says_how(xla_device, how, what):
    with pytest.raises(UserError) as caught:
        run(make(Wrong(how)))
    assert caught.value.what == what
    assert caught.value.where == "forward of Wrong"
