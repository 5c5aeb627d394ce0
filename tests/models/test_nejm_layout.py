"""Against the published `GRUDecoder`: its recorded checkpoint in our decoder gives its recorded logits.

`data/nejm` was recorded once with that code (Neuroprosthetics-Lab/nejm-brain-to-text, commit 980a5b7), PyTorch 2.9.1 in
a process without torch_xla, which replaces `nn.GRU`: its class with 4 features, 5 units, 3 days, 7 classes, 2 layers,
patch 3, stride 2, after seed 5 and noise of 0.3 on every parameter; wrapped in `torch.compile`, and saved by its
trainer's `save_model_checkpoint` after two steps of optimizer and scheduler, with a validation loss that is a NumPy
scalar as there. `case.npz` holds random features (4, 11, 4), days and the logits of the model in evaluation mode.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from xla_b2t.config import ModelConfig
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model
from xla_b2t.models.nejm_layout import from_nejm, to_nejm
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.tensor_file import read_tensor_file

RECORDED = Path(__file__).parent / "data" / "nejm"
OPTIONS = {"patch_bins": 3, "patch_stride": 2, "hidden": 5, "layers": 2}


def recorded_state():
    return read_tensor_file(RECORDED / "best_checkpoint")["model_state_dict"]


def test_nejm_weights_give_the_recorded_logits():
    model = build_model(ModelConfig(options=OPTIONS), Sizes(num_features=4, num_days=3, num_classes=7)).eval()
    model.load_state_dict(from_nejm(recorded_state(), 3, "recorded"))
    case = np.load(RECORDED / "case.npz")
    bins_B = torch.full((4,), 11, dtype=torch.int32)
    output = model(torch.from_numpy(case["features"]), bins_B, torch.from_numpy(case["days"]))
    assert case["logits"].shape == (4, 5, 7)
    torch.testing.assert_close(output.logits_BPK.detach(), torch.from_numpy(case["logits"]), rtol=0, atol=1e-6)


def test_nejm_state_there_and_back_has_the_same_names_and_bits():
    state = recorded_state()
    found = to_nejm(from_nejm(state, 3, "recorded"))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_nejm_prefixes_of_wrapped_models_do_not_matter(prefix):
    plain = {name.removeprefix("_orig_mod."): tensor for name, tensor in recorded_state().items()}
    found = from_nejm({prefix + name: tensor for name, tensor in plain.items()}, 3, "recorded")
    expected = from_nejm(plain, 3, "recorded")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nejm_days_are_ordered_by_number():
    state = {f"day_weights.{day}": torch.full((2, 2), float(day)) for day in sorted(range(12), key=str)}
    state |= {f"day_biases.{day}": torch.full((1, 2), float(day)) for day in sorted(range(12), key=str)}
    weights = from_nejm(state, 12, "here")
    assert weights["day.day_weight"][:, 0, 0].tolist() == list(range(12))
    assert weights["day.day_bias"].shape == (12, 2)
    assert weights["day.day_bias"][:, 1].tolist() == list(range(12))


def test_nejm_weights_in_bfloat16_become_float32():
    state = {name: tensor.bfloat16() for name, tensor in recorded_state().items()}
    assert {tensor.dtype for tensor in from_nejm(state, 3, "here").values()} == {torch.float32}


def test_nejm_days_that_are_not_the_sessions_are_refused():
    with pytest.raises(UserError) as caught:
        from_nejm(recorded_state(), 4, "folder/best_checkpoint")
    assert caught.value.what == "3 day_weights, and 4 sessions in its settings"
    assert caught.value.where == "folder/best_checkpoint"
    assert "args.yaml that was saved with it" in caught.value.fix


def test_nejm_day_biases_of_another_shape_are_refused():
    state = recorded_state()
    state["_orig_mod.day_biases.1"] = torch.zeros(2, 4)
    with pytest.raises(UserError) as caught:
        from_nejm(state, 3, "folder/best_checkpoint")
    assert caught.value.what == "day_biases of the shapes [(1, 4), (2, 4)], expected one, (1, C)"
    assert caught.value.where == "folder/best_checkpoint"
    assert caught.value.fix == "give a checkpoint of the published baseline"


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (["a"], "a list"),
        (torch.zeros(2), "a Tensor"),
        ({"x": 3}, "int under 'x'"),
        ({"day_weights.0": [1.0]}, "list under 'day_weights.0'"),
        ({3: torch.zeros(2)}, "Tensor under 3"),
    ],
)
def test_nejm_state_that_is_not_tensors_by_name_is_refused(state, found):
    with pytest.raises(UserError) as caught:
        from_nejm(state, 1, "folder/best_checkpoint")
    assert caught.value.what == f"its weights are not tensors by name: found {found}"
    assert caught.value.where == "folder/best_checkpoint"
    assert caught.value.fix == "give a checkpoint of the published baseline"
