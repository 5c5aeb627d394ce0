"""Parameters, buffers, optimizer tensors and inputs against the dtype policy, and the finding that each gives."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from xla_b2t import config as configuration
from xla_b2t.audit import stored
from xla_b2t.audit.construction import construct
from xla_b2t.models.protocol import Sizes
from xla_b2t.training.optimizer import NUM_CONTROLS, Slot, controls
from xla_b2t.training.step import initial_state, place_weights
from xla_b2t.training.traced import blank_batch

SIZES = Sizes(12, 3, 41)
HEAD = "import torch\nfrom torch import nn\n\n\n"
MODEL = """
class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.day_bias = nn.Parameter(torch.zeros(sizes.num_days, 1, sizes.num_features))
        self.norm = nn.LayerNorm(sizes.num_features)
        self.output = nn.Linear(sizes.num_features, sizes.num_classes)
{more}
    def output_steps(self, input_bins):
        return input_bins

    def forward(self, features_BTC, input_bins_B, days_B):
        raise NotImplementedError


def build(sizes, options):
    return Decoder(sizes){end}
"""


@pytest.fixture
def arrival(tmp_path, monkeypatch):
    """Writes a user's model with more lines in its constructor; gives its findings and its file."""
    monkeypatch.chdir(tmp_path)

    def look(*more, end="", keys=()):
        lines = "".join(f"        {line}\n" for line in more)
        (tmp_path / "mine.py").write_text(HEAD + MODEL.format(more=lines, end=end))
        config = configuration.load(None, ["model.factory=mine.py:build", *keys])
        return stored.arrival(construct(config.model, SIZES), config)

    return look


@pytest.fixture
def line_of(tmp_path):
    """The place of the one line of the model's file that holds a text."""

    def find(text):
        lines = (tmp_path / "mine.py").read_text().splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if text in line]
        return f"mine.py:{number}"

    return find


def one(findings):
    (finding,) = findings
    assert finding.found and finding.fix
    return finding


def test_arrival_of_model_in_one_dtype_finds_nothing(arrival):
    assert arrival() == []
    assert arrival(end=".bfloat16()") == []


def test_arrival_of_model_with_one_narrow_layer_names_its_tensors_and_lines(arrival, line_of):
    weight, bias = arrival("self.output.bfloat16()")
    assert (weight.kind, weight.name, weight.where) == ("dtype", "output.weight", line_of("self.output ="))
    assert (weight.found, weight.expected) == ("bfloat16", "float32, as the other 3")
    assert bias.name == "output.bias"
    assert "model.keep_float32" in weight.fix


def test_arrival_of_model_half_converted_blames_what_was_left_wide(arrival, line_of):
    narrowed = ["self.norm.bfloat16()", "self.day_bias.data = self.day_bias.data.bfloat16()"]
    found = arrival("self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))", *narrowed)
    assert [finding.name for finding in found] == ["output.weight", "output.bias"]
    assert {finding.expected for finding in found} == {"bfloat16, as the other 4"}
    assert found[0].where == line_of("self.output =")


def test_arrival_of_model_with_as_many_of_both_blames_what_was_left_wide(arrival):
    found = arrival("self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))", "self.norm.bfloat16()")
    assert {finding.name for finding in found} == {"day_bias", "output.weight", "output.bias"}


def test_arrival_does_not_mind_counters(arrival):
    assert arrival('self.register_buffer("seen", torch.zeros((), dtype=torch.int64))') == []


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_arrival_of_forbidden_dtype_is_found_even_where_a_pattern_keeps_it(arrival, line_of, dtype):
    keys = ['model.keep_float32=["scale"]']
    finding = one(arrival(f"self.scale = nn.Parameter(torch.ones(1, dtype=torch.{dtype}))", keys=keys))
    assert (finding.kind, finding.name, finding.where) == ("dtype", "scale", line_of("self.scale"))
    assert (finding.found, finding.expected) == (dtype, "float32")
    assert finding.fix == f"make it in float32: .float() or dtype=torch.float32, {finding.where}"


def test_arrival_of_exception_in_float32_beside_narrow_parameters_finds_nothing(arrival):
    kept = "self.norm.float()"
    assert arrival(kept, end=".bfloat16()", keys=['model.keep_float32=["^norm"]']) == []
    keys = ['model.keep_float32=["^scale$"]']
    lines = ["self.bfloat16()", "self.scale = nn.Parameter(torch.ones(1))"]
    assert arrival(*lines, keys=keys) == []
    assert one(arrival(*lines)).name == "scale"


def test_exceptions_lists_what_a_pattern_keeps_in_float32(tmp_path):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model.register_buffer("counts", torch.zeros(2, dtype=torch.int32))
    config = configuration.load(None, ['model.keep_float32=["^0.", "counts"]'])
    assert stored.exceptions(model, config) == (
        "0.weight stays float32 (model.keep_float32 '^0.')",
        "0.bias stays float32 (model.keep_float32 '^0.')",
    )
    assert stored.exceptions(model, configuration.load(None)) == ()


def test_arrival_of_pattern_that_finds_nothing_says_what_there_is(arrival):
    finding = one(arrival(keys=['model.keep_float32=["norm", "rms"]']))
    assert (finding.kind, finding.where) == ("exception", "config: model.keep_float32")
    assert finding.found == "'rms', which finds none of 5 parameters and buffers"
    assert finding.fix == "correct it, or leave it away; the first are called day_bias, norm.weight, norm.bias"


@pytest.mark.parametrize(
    ("line", "found", "fix"),
    [
        ("self.table = torch.zeros(3)", "a plain tensor, float32", 'self.register_buffer("table", ..., persistent='),
        ("self.table = [nn.Linear(2, 2)]", "1 modules in a plain list", "nn.ModuleList"),
        ("self.table = {'a': (nn.Parameter(torch.zeros(1)),)}", "1 parameters in a plain dict", "nn.ParameterDict"),
        ("self.table = (torch.zeros(1), torch.ones(1))", "2 tensors in a plain tuple", "self.register_buffer("),
    ],
)
def test_arrival_of_unregistered_state_names_the_attribute_and_its_line(arrival, line_of, line, found, fix):
    finding = one(arrival(line))
    assert (finding.kind, finding.name, finding.where) == ("unregistered", "table", line_of("self.table"))
    assert found in finding.found and fix in finding.fix
    assert finding.expected == "registered, so that the trainer moves, converts, trains and saves it"


def test_arrival_of_registered_state_listed_once_more_finds_nothing(arrival):
    assert arrival("self.layers = [self.norm, self.output]", "self.weights = {'day': self.day_bias}") == []


def test_arrival_of_two_parameters_over_one_memory_names_both(arrival, line_of):
    finding = one(arrival("self.tied = nn.Parameter(self.output.weight.data)"))
    assert (finding.kind, finding.name, finding.where) == ("shared", "tied", line_of("self.tied"))
    assert finding.found == "two parameters over the memory of output.weight"
    assert finding.fix == "assign the parameter itself, not its .data: tied = output.weight"


def test_arrival_of_one_parameter_under_two_names_is_found_where_their_rules_differ(arrival, line_of):
    assert arrival("self.tied = self.output.weight") == []
    finding = one(arrival("self.offset = self.day_bias"))
    assert (finding.kind, finding.name, finding.where) == ("shared", "offset", line_of("self.offset"))
    assert finding.found == "trained by the rule for 'day' as day_bias, and for 'rest' as offset"
    assert finding.expected == "one rule for one parameter"
    assert "optimizer.day_pattern" in finding.fix


# What the trainer makes of a model. Nothing of it is on a core here: dtypes are the same anywhere.


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()


@pytest.fixture
def slots(model):
    kept = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    return [
        Slot(name, "rest", parameter, kept[name], torch.zeros_like(kept[name]), torch.zeros_like(kept[name]))
        for name, parameter in model.named_parameters()
    ]


TOTALS = [torch.zeros(5)]


def test_optimizer_state_in_float32_finds_nothing(model, slots):
    assert stored.optimizer_state(slots, TOTALS, model) == []


@pytest.mark.parametrize("role", ["master", "moment1", "moment2"])
def test_optimizer_state_in_bfloat16_names_the_role_and_the_parameter(model, slots, role):
    narrow = {role: getattr(slots[2], role).bfloat16()}
    slots[2] = dataclasses.replace(slots[2], **narrow)
    finding = one(stored.optimizer_state(slots, TOTALS, model))
    assert (finding.kind, finding.name, finding.where) == ("dtype", f"{role} of 1.weight", "optimizer")
    assert (finding.found, finding.expected) == ("bfloat16", "float32")
    assert "an update of a bfloat16 weight is lost to rounding" in finding.fix


def test_optimizer_state_without_masters_says_none(model, slots):
    slots = [dataclasses.replace(slot, master=None) for slot in slots]
    found = stored.optimizer_state(slots, TOTALS, model)
    assert [finding.name for finding in found] == [f"master of {slot.name}" for slot in slots]
    assert {(finding.found, finding.expected) for finding in found} == {("none", "float32")}


def test_optimizer_state_with_totals_in_bfloat16_names_them(model, slots):
    finding = one(stored.optimizer_state(slots, [torch.zeros(4), torch.zeros(5).bfloat16()], model))
    assert (finding.kind, finding.name, finding.found, finding.expected) == ("dtype", "totals", "bfloat16", "float32")
    assert finding.fix == "sum losses and gradients in float32"


@pytest.fixture
def new_parameters():
    """Conversions of a module make new parameters, as its way to a core does."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def test_optimizer_state_of_model_converted_after_it_was_taken_is_found(model, slots, new_parameters):
    model.float()
    found = stored.optimizer_state(slots, TOTALS, model)
    assert [finding.name for finding in found] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {(finding.kind, finding.found) for finding in found} == {
        ("optimizer", "another tensor than the model computes with")
    }
    assert found[0].expected == "the model's own parameter for every slot"
    assert "after the last .to(), .bfloat16() or .half()" in found[0].fix


def test_optimizer_state_without_a_slot_for_a_parameter_is_found_unless_it_is_frozen(model, slots):
    finding = one(stored.optimizer_state(slots[:3], TOTALS, model))
    assert (finding.kind, finding.name, finding.found) == ("optimizer", "1.bias", "nothing")
    model[1].bias.requires_grad_(False)
    assert stored.optimizer_state(slots[:3], TOTALS, model) == []


def test_place_weights_keeps_what_a_pattern_names_in_float32():
    """The trainer's own placing keeps the policy that is audited here."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model.register_buffer("counts", torch.zeros(2, dtype=torch.int32))
    config = configuration.load(None, ['model.keep_float32=["^0."]'])
    place_weights(model, config.model, initial_state(model), list)
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert dtypes == {
        "0.weight": torch.float32, "0.bias": torch.float32, "1.weight": torch.bfloat16, "1.bias": torch.bfloat16,
        "counts": torch.int32,
    }  # fmt: skip


@pytest.fixture
def batch():
    return blank_batch(4, 40, 12, 10)


CONTROLS_N = torch.from_numpy(controls(7, True, configuration.load(None).optimizer))


def test_inputs_of_the_policys_dtypes_find_nothing(batch):
    assert CONTROLS_N.shape == (NUM_CONTROLS,)
    assert stored.inputs(batch, CONTROLS_N, "feed") == []


@pytest.mark.parametrize(
    ("field", "dtype", "expected"),
    [
        ("labels_BL", torch.int64, "int32"),
        ("input_bins_B", torch.int64, "int32"),
        ("label_lengths_B", torch.int64, "int32"),
        ("required_steps_B", torch.int16, "int32"),
        ("days_B", torch.int64, "int32"),
        ("features_BTC", torch.float32, "bfloat16"),
        ("valid_B", torch.float32, "bool"),
    ],
)
def test_inputs_of_another_dtype_are_named(batch, field, dtype, expected):
    finding = one(stored.inputs(batch._replace(**{field: getattr(batch, field).to(dtype)}), CONTROLS_N, "feed"))
    assert (finding.kind, finding.name, finding.where) == ("input", field, "feed")
    assert (finding.found, finding.expected) == (str(dtype).removeprefix("torch."), expected)
    assert finding.fix == "convert it on the host"


def test_inputs_with_a_learning_rate_in_float64_are_named(batch):
    finding = one(stored.inputs(batch, torch.from_numpy(np.full(NUM_CONTROLS, 1e-3)), "feed"))
    assert (finding.name, finding.found, finding.expected) == ("learning rate and flags", "float64", "float32")


def test_inputs_lists_everything_that_differs(batch):
    wrong = batch._replace(labels_BL=batch.labels_BL.long(), features_BTC=batch.features_BTC.float())
    found = stored.inputs(wrong, CONTROLS_N.double(), "feed")
    assert [finding.name for finding in found] == ["features_BTC", "labels_BL", "learning rate and flags"]
