"""The example of a user's own model: right in its parts, sound for the preflight, and it learns."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from xla_b2t import cli
from xla_b2t import config as configuration
from xla_b2t.memory.free_memory import largest_batch
from xla_b2t.models.build import build_model, build_without_weights
from xla_b2t.models.protocol import Sizes, checked
from xla_b2t.training.loop import Job, run_rank
from xla_b2t.xla.world import Alone

FACTORY = f"model.factory={Path(__file__).parents[2] / 'examples' / 'tft.py'}:build"
SMALL = "model.options={ patch_bins = 4, patch_stride = 2, hidden = 16, heads = 2, variable_width = 2, dropout = 0.0 }"
SIZES = Sizes(num_features=6, num_days=3, num_classes=41)
TRIALS, BINS = 3, 24


@pytest.fixture(scope="module")
def model():
    return build_model(configuration.load(None, [FACTORY, SMALL]).model, SIZES, seed=1).double()


def sample():
    generator = torch.Generator().manual_seed(2)
    features_BTC = torch.randn(TRIALS, BINS, SIZES.num_features, generator=generator, dtype=torch.float64)
    return features_BTC, torch.tensor([BINS, 9, 0], dtype=torch.int32), torch.tensor([0, 2, 1], dtype=torch.int32)


def test_tft_lstm_output_and_gradients_equal_torch(model):
    ours, steps = model.lstm[0], 7
    theirs = nn.LSTM(16, 16).double()
    with torch.no_grad():
        weights = (ours.project.weight, ours.weight_hh, ours.project.bias, torch.zeros(64))
        for parameter, value in zip(theirs.parameters(), weights, strict=True):
            parameter.copy_(value)
    torch.manual_seed(3)
    x, h0, c0 = torch.randn(steps, TRIALS, 16), torch.randn(TRIALS, 16), torch.randn(TRIALS, 16)
    inputs = [tensor.double().requires_grad_() for tensor in (x, h0, c0)]
    found, expected = ours(*inputs), theirs(inputs[0], (inputs[1][None], inputs[2][None]))[0]
    torch.testing.assert_close(found, expected)
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    leaves = [ours.project.weight, ours.weight_hh, ours.project.bias]
    gradients = torch.autograd.grad((found * weight).sum(), [*inputs, *leaves])
    their_leaves = [theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0]
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weight).sum(), [*inputs, *their_leaves]))


def test_tft_lstm_in_an_xla_graph_equals_the_plain_loop(on_xla):
    layer = build_model(configuration.load(None, [FACTORY, SMALL]).model, SIZES, seed=1).lstm[0]
    generator = torch.Generator().manual_seed(3)
    shapes = ((7, TRIALS, 16), (TRIALS, 16), (TRIALS, 16))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = dict(layer.named_parameters())

    def run(*tensors):
        leaves = [tensor.requires_grad_() for tensor in tensors]
        hidden_PBH = torch.func.functional_call(layer, dict(zip(weights, leaves[3:], strict=True)), tuple(leaves[:3]))
        return [hidden_PBH, *torch.autograd.grad((hidden_PBH * hidden_PBH).sum(), leaves)]

    tensors = [*inputs, *(parameter.detach() for parameter in weights.values())]
    found, text = on_xla(run, *tensors)
    expected = [result.detach() for result in run(*(tensor.clone() for tensor in tensors))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(re.findall(r" while\(", text)) == 2


def test_tft_per_variable_layer_is_a_matmul_for_each_variable(model):
    layer, x = model.selection.transform.first, sample()[0][0, :, :4, None].transpose(1, 2).expand(-1, 6, -1)
    by_hand = [x[:, c] @ layer.weight[c] + layer.bias[c] for c in range(6)]
    torch.testing.assert_close(layer(x), torch.stack(by_hand, dim=1))


def test_tft_attention_is_the_mean_of_its_heads_over_real_steps(model):
    layer, steps = model.attention, 5
    x_PBH = torch.randn(steps, 2, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    is_real_BP = torch.tensor([[True] * 5, [True, True, False, False, False]])
    rows = []
    for trial, real in enumerate((5, 2)):
        query, key = layer.query(x_PBH[:, trial]), layer.key(x_PBH[:real, trial])
        heads = [torch.softmax(query[:, h : h + 8] @ key[:, h : h + 8].t() / 8**0.5, dim=1) for h in (0, 8)]
        rows.append(layer.out((heads[0] + heads[1]) / 2 @ layer.value(x_PBH[:real, trial])))
    torch.testing.assert_close(layer(x_PBH, is_real_BP), torch.stack(rows, dim=1))


def test_tft_keeps_the_protocol_and_does_not_see_what_is_padding(model):
    features_BTC, input_bins_B, days_B = sample()
    output = checked(model(features_BTC, input_bins_B, days_B), features_BTC, 41, model)
    assert output.steps_B.tolist() == [model.output_steps(bins) for bins in (BINS, 9, 0)] == [11, 3, 1]
    changed_BTC = features_BTC.clone()
    changed_BTC[1, 9:] += 5
    again = model(changed_BTC, input_bins_B, days_B)
    torch.testing.assert_close(again.logits_BPK[1, :3], output.logits_BPK[1, :3])
    assert not torch.allclose(again.logits_BPK[1, 3:], output.logits_BPK[1, 3:])


def test_tft_scores_depend_on_the_day(model):
    features_BTC, input_bins_B, _ = sample()
    first, other = (model(features_BTC, input_bins_B, torch.full((3,), day, dtype=torch.int32)) for day in (0, 1))
    assert not torch.allclose(first.logits_BPK, other.logits_BPK)


def test_tft_graph_of_a_long_trial_is_as_large_as_that_of_a_short_one(xla_device):
    import torch_xla

    def num_instructions(bins):
        model = build_model(configuration.load(None, [FACTORY, SMALL]).model, SIZES, seed=1).bfloat16().to(xla_device)
        inputs = (torch.zeros(2, bins, 6, dtype=torch.bfloat16), torch.full((2,), bins), torch.zeros(2))
        features_BTC, *rest = (tensor.to(xla_device) for tensor in inputs)
        logits_BPK, *_ = model(features_BTC, *(tensor.int() for tensor in rest))
        logits_BPK.float().sum().backward()
        text = torch_xla._XLAC._get_xla_tensors_hlo([parameter.grad for parameter in model.parameters()])
        return text.count(" = "), len(re.findall(r" while\(", text))

    short, long = num_instructions(24), num_instructions(204)
    assert short == long
    assert short[1] == 4  # two layers, forward and backward


def test_tft_size_computed_from_the_module_is_what_free_memory_takes():
    config = configuration.load(None, [FACTORY])
    model = build_without_weights(config.model, Sizes(num_features=225, num_days=45, num_classes=41))
    patch, hidden, features = 14 * 225, 256, 225
    network = 4 * hidden * (hidden + 1) + 2 * hidden
    weigh = (patch + 1 + hidden) * hidden + hidden * (hidden + 1) + (2 * hidden + patch + 3 + 2) * features
    transform = features * (8 * (14 + 1) + 8 * (8 + 1) + 16 * (8 + 1) + 8 * (14 + 1)) + 16
    collect = features * 8 * hidden + hidden
    lstm = 2 * (8 * hidden + 4) * hidden
    gates = 3 * (2 * hidden * (hidden + 1) + 2 * hidden)
    attention = 2 * hidden * (hidden + 1) + 32 * (hidden + 1) + hidden * (32 + 1)
    by_hand = 45 * hidden + 8 * network + hidden * hidden + weigh + transform + collect + lstm + gates + attention
    by_hand += 41 * (hidden + 1)
    count = sys.modules[type(model).__module__].num_parameters(model)
    assert count == by_hand
    answer = largest_batch(
        free_bytes=3_669_000_000, base_bytes=count, num_steps=1000, num_inputs=225, precision="float32", max_batch=64
    )
    assert (answer.weights_bytes, answer.batch_size) == (4 * count, 64)


def test_tft_passes_the_preflight(small_groups, capsys):
    keys = [FACTORY, SMALL, f"data.dir={small_groups}", "train.batch_size=8"]
    assert cli.main(["audit-dtypes", "--json", "--cores", "2", *[w for key in keys for w in ("--set", key)]]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["clean"] and result["checked"]["graphs"] >= 2


def test_tft_learns_its_training_trials(xla_device, small_groups, tmp_path):
    rate = "{ peak = 1e-2, final = 1e-3, warmup_steps = 4, decay_steps = 40 }"
    keys = [FACTORY, SMALL, f"data.dir={small_groups}", f"run.dir={tmp_path}/run", "train.global_batch=8"]
    keys += ["optimizer.eps=1e-8", f"optimizer.rate={rate}", f"optimizer.day_rate={rate}", "validation.every=0"]
    keys += ["augment.white_noise_std=0.0", "augment.constant_offset_std=0.0", "train.steps=16", "train.log_every=4"]
    keys += ["model.dtype=float32", "augment.start_shift_bins=0", "augment.smooth_sigma_bins=0.0"]
    job = Job(configuration.load(None, keys), checkpoint="", allow_recompile=False, seconds={}, started=0.0)
    run_rank(Alone("cpu"), job)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train_loss_last"] < 0.8 * summary["train_loss_first"]
    assert summary["compiles_after_warmup"] == summary["host_fallbacks"] == 0
