"""A model without weights, and the lines that its tensors come from."""

import pytest
import torch
from torch import nn

from xla_b2t.audit.construction import construct
from xla_b2t.config import ModelConfig
from xla_b2t.errors import UserError
from xla_b2t.models.protocol import Sizes

SIZES = Sizes(12, 3, 41)
MODEL = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))  # weight of a layer
        self.register_parameter("late", nn.Parameter(torch.zeros(size)))  # late


class Decoder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.output = nn.Linear(sizes.num_features, sizes.num_classes)  # output
        self.layers = nn.ModuleList([Layer(4), Layer(5)])
        self.register_buffer("taps", torch.ones(3))  # taps
        self.table = torch.zeros(3)  # table
        self.rates = [1.0, 2.0]  # rates
        self.size = 7  # size
        {more}

    def output_steps(self, input_bins):
        return input_bins

    def forward(self, features_BTC, input_bins_B, days_B):
        raise NotImplementedError


def build(sizes, options):
    model = Decoder(sizes)
    model.output.bias = nn.Parameter(torch.zeros(sizes.num_classes))  # replaced
    return model
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Constructs the model, with one more line in its constructor."""
    monkeypatch.chdir(tmp_path)

    def make(more="pass"):
        (tmp_path / "mine.py").write_text(MODEL.format(more=more))
        return construct(ModelConfig(factory="mine.py:build"), SIZES)

    return make


def place(comment):
    (line,) = [n for n, line in enumerate(MODEL.splitlines(), 1) if line.endswith(f"# {comment}")]
    return f"mine.py:{line}"


def test_construct_builds_on_no_memory(made):
    model = made().model
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert model.output.weight.shape == (41, 12)


@pytest.mark.parametrize(
    ("name", "comment"),
    [
        ("layers.0.weight", "weight of a layer"),
        ("layers.1.weight", "weight of a layer"),
        ("layers.1.late", "late"),
        ("output.weight", "output"),
        ("output.bias", "replaced"),
        ("taps", "taps"),
    ],
)
def test_construct_remembers_the_users_line_of_every_tensor(made, name, comment):
    assert made().line_of(name) == place(comment)


def test_construct_remembers_attributes_that_may_hold_tensors(made):
    made = made()
    lines = {name: line for (module, name), line in made.lines.items() if module == id(made.model)}
    assert (lines["table"], lines["rates"]) == (place("table"), place("rates"))
    assert "size" not in lines


def test_construct_knows_the_order_of_registration(made):
    made = made()
    names = ["output.weight", "layers.0.weight", "layers.0.late", "layers.1.weight", "taps"]
    orders = [made.order_of(name) for name in names]
    assert orders == sorted(orders) and len(set(orders)) == len(orders)
    assert made.order_of("output.bias") < made.order_of("taps")  # where it was first registered


def test_construct_of_a_tensor_that_nobody_registered_has_no_line(made):
    made = made()
    made.model._parameters["smuggled"] = nn.Parameter(torch.zeros(1))
    assert made.line_of("smuggled") == ""
    assert made.order_of("smuggled") == -1


def test_construct_of_constructor_that_reads_values_builds_on_the_cpu(made):
    made = made("self.sums = nn.Parameter(torch.ones(int(torch.ones(2).sum())))")
    assert made.model.sums.shape == (2,)
    assert {tensor.device.type for tensor in (*made.model.parameters(), *made.model.buffers())} == {"cpu"}
    assert made.line_of("sums") == f"mine.py:{int(place('size').rpartition(':')[2]) + 1}"
    assert made.line_of("output.weight") == place("output")


@pytest.mark.parametrize("more", ["pass", "raise ValueError('no')"])
def test_construct_leaves_modules_of_torch_as_they_were(made, more):
    before = nn.Module.__setattr__
    try:
        made(more)
    except UserError:
        assert more != "pass"
    assert nn.Module.__setattr__ is before
    layer = nn.Linear(2, 2)
    assert not torch.nn.modules.module._global_parameter_registration_hooks
    assert not torch.nn.modules.module._global_buffer_registration_hooks
    assert layer.weight.device.type == "cpu"


def test_construct_of_constructor_that_fails_says_what_where_and_fix(made):
    with pytest.raises(UserError) as caught:
        made("raise ValueError('eleven')")
    error = caught.value
    assert "ValueError: eleven" in error.what
    assert error.where == f"mine.py:{int(place('size').rpartition(':')[2]) + 1}"
    assert error.fix == "correct the line"
