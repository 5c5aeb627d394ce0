"""From `[model]` to a module: ours, the user's, and every mistake in between."""

import threading

import pytest
import torch

from xla_b2t.config import Config, ModelConfig
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_model, build_without_weights, with_all_options
from xla_b2t.models.protocol import Sizes

SIZES = Sizes(num_features=6, num_days=3, num_classes=5)
SMALL = {"patch_bins": 4, "patch_stride": 2, "hidden": 8, "layers": 2}


def refused(config):
    with pytest.raises(UserError) as caught:
        build_model(config, SIZES)
    return caught.value.what, caught.value.where, caught.value.fix


def test_build_gru_decoder_has_the_published_number_of_parameters_without_memory():
    with torch.device("meta"):
        model = build_model(ModelConfig(), Sizes(512, 45, 41))
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_315_177
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_build_gru_decoder_takes_options_and_gives_float32():
    model = build_model(ModelConfig(options=SMALL), SIZES)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.gru.weight_ih_l0.shape == (24, 24)
    assert model.output_steps(10) == 4


def test_build_of_an_unknown_model_names_the_known():
    what, where, fix = refused(ModelConfig(name="transformer"))
    assert what == "there is no model 'transformer'; known: gru_decoder, noise_split"
    assert where == "configuration: model.name"
    assert fix == "set model.name to one of them, or model.factory to one of your own"


def test_build_of_a_misspelt_model_suggests_the_nearest():
    what, where, fix = refused(ModelConfig(name="noise-split"))
    assert what == "there is no model 'noise-split'; known: gru_decoder, noise_split"
    assert where == "configuration: model.name"
    assert fix == "did you mean noise_split?"


def test_with_all_options_of_an_unknown_model_or_option_is_refused_as_by_build():
    for model in (ModelConfig(name="noise-split"), ModelConfig(options={"hiden": 5})):
        with pytest.raises(UserError) as caught:
            with_all_options(Config(model=model))
        assert caught.value.args == refused(model)
    users = Config(model=ModelConfig(factory="my_model.py:build", options={"width": 3}))
    assert with_all_options(users) is users


def test_build_without_weights_of_our_model_takes_no_memory():
    model = build_without_weights(ModelConfig(), Sizes(512, 45, 41))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


READS_A_VALUE = """
import torch


class Mine(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.patch = int(torch.tensor([4, 2]).max().item()) + len(torch.ones(3).numpy())
        self.out = torch.nn.Linear(sizes.num_features, sizes.num_classes)

    def forward(self, features_BTC, input_bins_B, days_B):
        return None

    def output_steps(self, input_bins):
        return input_bins - self.patch


def build(sizes, options):
    return Mine(sizes)


def build_never(sizes, options):
    return torch.zeros(1).item() + options["width"]
"""


def test_build_without_weights_of_a_model_that_reads_a_value_is_on_the_cpu(tmp_path):
    path = tmp_path / "reads.py"
    path.write_text(READS_A_VALUE)
    before = torch.get_rng_state()
    model = build_without_weights(ModelConfig(factory=f"{path}:build"), SIZES)
    assert (model.output_steps(10), model.out.weight.device.type) == (3, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_build_without_weights_of_a_model_that_fails_everywhere_says_how_it_fails_on_the_cpu(tmp_path):
    path = tmp_path / "never.py"
    path.write_text(READS_A_VALUE)
    with pytest.raises(UserError) as caught:
        build_without_weights(ModelConfig(factory=f"{path}:build_never"), SIZES)
    assert caught.value.what == "the factory failed: KeyError: 'width'"
    assert caught.value.where == f"{path}:{READS_A_VALUE.splitlines().index('def build_never(sizes, options):') + 2}"
    assert caught.value.fix == "correct the line"


def test_build_without_weights_passes_on_what_is_wrong_with_our_options():
    with pytest.raises(UserError) as caught:
        build_without_weights(ModelConfig(options={"hiden": 5}), SIZES)
    assert caught.value.args == refused(ModelConfig(options={"hiden": 5}))


def test_build_with_an_unknown_option_suggests_the_nearest():
    what, where, fix = refused(ModelConfig(options={"hiden": 5}))
    assert what == "unknown key model.options.hiden"
    assert where == "configuration: model.options.hiden"
    assert fix == "did you mean model.options.hidden?"


def test_build_with_an_option_of_the_wrong_type_names_it():
    what, where, fix = refused(ModelConfig(options={"hidden": "wide"}))
    assert what == "model.options.hidden is 'wide', expected an integer >= 1"
    assert where == "configuration: model.options.hidden"
    assert "model.options.hidden" in fix


@pytest.mark.parametrize(
    ("model", "name", "value", "expected"),
    [
        ("gru_decoder", "layers", 0, "an integer >= 1"),
        ("gru_decoder", "dropout", 1.0, "a number >= 0 and <= 0.99"),
        ("noise_split", "noise_layers", 0, "an integer >= 1"),
        ("noise_split", "noisy_weight", 0.0, "a number > 0"),
        ("noise_split", "reversal", -1.0, "a number >= 0"),
        ("noise_split", "reversal_ramp_steps", -1, "an integer >= 0"),
    ],
)
def test_build_with_an_option_out_of_range_says_the_range(model, name, value, expected):
    what, where, fix = refused(ModelConfig(name=model, options={name: value}))
    assert what == f"model.options.{name} is {value}, expected {expected}"
    assert where == f"configuration: model.options.{name}"
    assert fix.startswith(f"for example model.options.{name} = ")


USERS_MODEL = """
from dataclasses import dataclass

import torch

from xla_b2t.models.protocol import DecoderOutput


@dataclass
class Settings:
    width: int


class Mine(torch.nn.Module):
    def __init__(self, sizes, settings):
        super().__init__()
        self.out = torch.nn.Linear(sizes.num_features, sizes.num_classes)
        self.settings = settings

    def forward(self, features_BTC, input_bins_B, days_B):
        return DecoderOutput(self.out(features_BTC), input_bins_B)

    def output_steps(self, input_bins):
        return input_bins


def build(sizes, options):
    return Mine(sizes, Settings(**options))


def build_number(sizes, options):
    return 5


def build_half(sizes, options):
    return torch.nn.Linear(2, 2)


def build_alone():
    return None
"""


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(USERS_MODEL)
    return path


def test_build_by_a_users_factory_passes_sizes_and_options(users_file):
    model = build_model(ModelConfig(factory=f"{users_file}:build", options={"width": 7}), SIZES)
    assert model.out.weight.shape == (5, 6)
    assert model.settings.width == 7


@pytest.mark.parametrize("factory", ["my_model.py", "my_model.py:", ":build"])
def test_build_by_a_factory_without_file_or_function_shows_the_form(factory):
    what, where, fix = refused(ModelConfig(factory=factory))
    assert what == f"{factory!r} is not file.py:function"
    assert where == "model.factory"
    assert 'factory = "path/to/my_model.py:build"' in fix


def test_build_by_a_factory_in_no_file_names_the_path(tmp_path):
    what, where, fix = refused(ModelConfig(factory=f"{tmp_path}/none.py:build"))
    assert what == f"there is no file {tmp_path}/none.py"
    assert where.startswith("model.factory: ")
    assert "existing" in fix


@pytest.mark.parametrize(
    ("function", "message", "advice"),
    [
        ("missing", "there is no function missing in it", "define missing(sizes, options)"),
        ("build_number", "the factory returned int, a torch.nn.Module is needed", "return the model"),
        ("build_half", "the model Linear has no method output_steps", "add output_steps"),
        ("build_alone", "cannot be called with (sizes, options): too many positional", "two parameters"),
    ],
)
def test_build_by_a_factory_that_gives_no_decoder_says_what_is_missing(users_file, function, message, advice):
    what, where, fix = refused(ModelConfig(factory=f"{users_file}:{function}"))
    assert message in what
    assert str(users_file) in where
    assert advice in fix


@pytest.mark.parametrize(
    ("text", "line", "message", "way_out"),
    [
        (
            "\nimport no_such_package_here\n", 2, "ModuleNotFoundError: No module named 'no_such_package_here'",
            "install no_such_package_here, or put the folder that it lies in on PYTHONPATH",
        ),
        ("x = 1\ndef build(:\n", 2, "SyntaxError: ", "correct the line"),
        ("def half():\n    return 1 / 0\n\nhalf()\n", 2, "ZeroDivisionError: division by zero", "correct the line"),
        (
            "import sys\nsys.exit(3)\n", 2, "SystemExit: 3",
            "move what reads the command line or ends the program under if __name__ == '__main__'",
        ),
    ],
)  # fmt: skip
def test_build_by_a_factory_in_a_file_that_cannot_be_imported_names_the_line(tmp_path, text, line, message, way_out):
    path = tmp_path / "broken.py"
    path.write_text(text)
    what, where, fix = refused(ModelConfig(factory=f"{path}:build"))
    assert what.startswith(f"the file cannot be imported: {message}")
    assert where == f"{path}:{line}"
    assert fix == way_out


def test_build_by_a_factory_that_fails_names_the_line_of_the_users_file(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text("import torch\n\n\ndef build(sizes, options):\n    return torch.nn.Linear(sizes.nom_features, 2)\n")
    with pytest.raises(UserError) as caught:
        build_model(ModelConfig(factory=f"{path}:build"), SIZES)
    assert caught.value.what == ("the factory failed: AttributeError: 'Sizes' object has no attribute 'nom_features'")
    assert caught.value.where == f"{path}:5"
    assert caught.value.fix == "correct the line"
    assert isinstance(caught.value.__cause__, AttributeError)


def test_build_by_a_factory_that_fails_deep_in_torch_names_the_users_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path is given as users give it, relative
    (tmp_path / "deep.py").write_text("import torch\ndef build(sizes, options):\n    return torch.nn.Linear(2, -1)\n")
    what, where, _ = refused(ModelConfig(factory="deep.py:build"))
    assert what.startswith("the factory failed: RuntimeError: ")
    assert where == "deep.py:3"


def test_build_by_a_factory_that_builds_on_our_model_passes_its_user_error_on(tmp_path):
    path = tmp_path / "ours.py"
    path.write_text(
        "from xla_b2t.config import ModelConfig\n"
        "from xla_b2t.models.build import build_model\n"
        "def build(sizes, options):\n"
        "    return build_model(ModelConfig(options=options), sizes)\n"
    )
    config = ModelConfig(factory=f"{path}:build", options=SMALL)
    assert build_model(config, SIZES, seed=1).output_steps(10) == 4
    what, _, _ = refused(ModelConfig(factory=f"{path}:build", options={"hiden": 5}))
    assert what == "unknown key model.options.hiden"


def test_build_by_a_factory_that_is_no_python_file_says_so(tmp_path):
    path = tmp_path / "model.txt"
    path.write_text("")
    what, _, fix = refused(ModelConfig(factory=f"{path}:build"))
    assert what == f"{path} is not a Python file"
    assert ".py" in fix


def test_build_with_a_seed_in_threads_gives_every_thread_the_same_weights():
    models = [None] * 4
    ready = threading.Barrier(len(models))

    def build(number):
        ready.wait()
        models[number] = build_model(ModelConfig(options={**SMALL, "hidden": 64, "layers": 4}), SIZES, seed=7)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = build_model(ModelConfig(options={**SMALL, "hidden": 64, "layers": 4}), SIZES, seed=7).state_dict()
    for model in models:
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, alone[name]), name


def test_build_with_a_seed_leaves_the_generator_as_it_was():
    before = torch.get_rng_state()
    first = build_model(ModelConfig(options=SMALL), SIZES, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    other = build_model(ModelConfig(options=SMALL), SIZES, seed=8).state_dict()
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())
