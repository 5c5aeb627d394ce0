import msgspec
import pytest

from xla_b2t.config import Config, Record, decode, dumps, load, loads
from xla_b2t.errors import UserError


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path, *overrides):
    with pytest.raises(UserError) as caught:
        load(path, list(overrides))
    return caught.value


def test_load_nothing_gives_the_published_recipe():
    config = load(None)
    assert config == Config()
    assert (config.optimizer.rate.peak, config.optimizer.eps, config.optimizer.clip_norm) == (5e-3, 0.1, 10.0)
    assert (config.train.steps, config.train.global_batch, config.augment.start_shift_bins) == (120_000, 64, 2)


def test_load_file_keeps_the_defaults_of_what_it_leaves_out(tmp_path):
    config = load(write(tmp_path, "[train]\nsteps = 10\n"))
    assert config.train.steps == 10
    assert config.train.accumulation == Config().train.accumulation


def test_data_num_features_is_what_the_groups_have_unless_it_is_given():
    assert load(None).data.num_features == 0
    assert load(None, ["data.num_features=256"]).data.num_features == 256
    error = refusal(None, "data.num_features=-1")
    assert error.what == "data.num_features is -1, expected an integer >= 0"
    assert error.where == "--set data.num_features=-1: data.num_features"
    assert error.fix == "for example data.num_features = 0"


def test_dumps_loaded_again_is_equal(tmp_path):
    config = load(
        None, ["model.options.hidden=64", 'model.options.note="x"', "optimizer.rate.peak=0.25", "run.dir=runs/a b"]
    )
    assert load(write(tmp_path, dumps(config))) == config
    assert loads(dumps(config), "best.pt") == config


def test_loads_unknown_key_names_the_place_it_comes_from():
    with pytest.raises(UserError) as caught:
        loads("[train]\nfuture = 1\n", "runs/demo/checkpoints/best.pt")
    assert caught.value.what == "unknown key train.future"
    assert caught.value.where == "runs/demo/checkpoints/best.pt: train.future"
    assert caught.value.fix.startswith("the keys here are accumulation, agreement_every, batch_size")


def test_loads_broken_text_names_the_place_it_comes_from():
    with pytest.raises(UserError) as caught:
        loads("[train", "best.pt")
    assert caught.value.what.startswith("the configuration kept here is not TOML: ")
    assert (caught.value.where, caught.value.fix) == ("best.pt", "use another file")


def test_load_binary_file_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    error = refusal(path)
    assert error.what.startswith("this is not TOML: 'utf-8' codec can't decode byte 0xff")
    assert (error.where, error.fix) == (str(path), "correct the line that is named")


def test_load_missing_file_says_what_where_and_fix(tmp_path):
    error = refusal(tmp_path / "absent.toml")
    assert error.what == "the configuration cannot be read: No such file or directory"
    assert error.where == str(tmp_path / "absent.toml")
    assert error.fix == "give --config a TOML file, or none"


def test_load_broken_toml_names_the_line(tmp_path):
    path = write(tmp_path, "[train]\nsteps 10\n")
    error = refusal(path)
    assert error.what.startswith("this is not TOML: ")
    assert "line 2" in error.what
    assert error.where == str(path)
    assert error.fix == "correct the line that is named"


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("[train]\nstep = 10\n", "train.step", "did you mean train.steps?"),
        ("[trian]\nsteps = 10\n", "trian", "did you mean train?"),
        ("[optimizer.rate]\npeek = 1.0\n", "optimizer.rate.peek", "did you mean optimizer.rate.peak?"),
        ("[validation]\nxyz = 1\n", "validation.xyz", "the keys here are batch_size, every, split"),
    ],
)
def test_load_unknown_key_names_file_key_and_nearest(tmp_path, text, key, fix):
    path = write(tmp_path, text)
    error = refusal(path)
    assert error.what == f"unknown key {key}"
    assert error.where == f"{path}: {key}"
    assert error.fix == fix


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ('[train]\nsteps = "ten"\n', "train.steps is 'ten', expected an integer >= 1", "train.steps = 120000"),
        ("[train]\nsteps = 0\n", "train.steps is 0, expected an integer >= 1", "train.steps = 120000"),
        ("[train]\nbatch_size = -8\n", "train.batch_size is -8, expected an integer >= 0", "train.batch_size = 0"),
        ("[optimizer]\nbeta1 = 1.0\n", "optimizer.beta1 is 1.0, expected a number >= 0 and < 1", "beta1 = 0.9"),
        ("[optimizer]\neps = 0\n", "optimizer.eps is 0, expected a number > 0", "optimizer.eps = 0.1"),
        ("[optimizer.rate]\npeak = nan\n", "optimizer.rate.peak is nan, expected a number >= 0", "peak = 0.005"),
        ("[optimizer.rate]\npeak = inf\n", "optimizer.rate.peak is inf, expected a number >= 0", "peak = 0.005"),
        ("[run]\ndir = 5\n", "run.dir is 5, expected a string", 'run.dir = "runs/latest"'),
        ("train = 5\n", "train is 5, expected a table of keys", "correct what is named"),
        ('[data]\nrecipe = "epoch"\n', 'data.recipe is \'epoch\', expected one of "days", "epochs"', '"epochs"?'),
        (
            '[optimizer]\nday_pattern = "("\n',
            "day_pattern = '(' is not a regular expression: missing ), unterminated subpattern at position 0",
            "correct what is named",
        ),
    ],
)
def test_load_wrong_value_says_found_expected_and_an_example(tmp_path, text, what, fix):
    path = write(tmp_path, text)
    error = refusal(path)
    assert error.what == what
    assert error.where.startswith(f"{path}: {what.split(' ')[0].removeprefix('day_pattern')}")
    assert error.fix.endswith(fix)


def test_set_overrides_the_file_and_the_last_one_wins(tmp_path):
    path = write(tmp_path, "[train]\nsteps = 10\n")
    assert load(path, ["train.steps=20", "train.steps = 30"]).train.steps == 30


@pytest.mark.parametrize(
    ("override", "value"),
    [("run.dir=runs/first", "runs/first"), ('run.dir="5"', "5"), ("run.dir=2023-08-11", "2023-08-11")],
)
def test_set_bare_word_is_a_string(override, value):
    assert load(None, [override]).run.dir == value


def test_set_mistake_is_blamed_on_its_override(tmp_path):
    path = write(tmp_path, "[train]\nsteps = 10\n")
    error = refusal(path, "run.seed=1", "train.stepz=5", "train.steps=6")
    assert error.what == "unknown key train.stepz"
    assert error.where == "--set train.stepz=5: train.stepz"
    assert error.fix == "did you mean train.steps?"


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("train.steps", "'train.steps' is not key=value"),
        ("=5", "'=5' is not key=value"),
        ("train.=5", "'train.=5' is not key=value"),
    ],
)
def test_set_without_key_or_value_is_refused(override, what):
    error = refusal(None, override)
    assert (error.what, error.where) == (what, f"--set {override}")
    assert error.fix == "write it as --set train.steps=100"


def test_set_below_a_value_is_refused():
    error = refusal(None, "train.steps=1", "train.steps.more=1")
    assert (error.what, error.where) == ("steps is a value, not a table", "--set train.steps.more=1")
    assert "config.toml" in error.fix


@pytest.mark.parametrize(
    ("file", "overrides", "sizes"),
    [
        ("", [], (0, 64)),
        ("[train]\nbatch_size = 16\n", [], (16, 0)),
        ("[train]\nglobal_batch = 32\n", [], (0, 32)),
        ("[train]\nglobal_batch = 32\n", ["train.batch_size=8"], (8, 0)),
        ("[train]\nbatch_size = 16\n", ["train.global_batch=32"], (0, 32)),
        ("[train]\nbatch_size = 16\nglobal_batch = 32\n", [], (16, 32)),
        ("", ["train.batch_size=16", "train.global_batch=32"], (16, 32)),
        ("[train]\nbatch_size = 16\n", ["train.steps=5"], (16, 0)),
    ],
)
def test_batch_size_given_alone_makes_the_other_follow(tmp_path, file, overrides, sizes):
    train = load(write(tmp_path, file), overrides).train
    assert (train.batch_size, train.global_batch) == sizes


class Options(Record):
    hidden: int
    layers: int = 5


def test_decode_other_records_names_the_prefix():
    with pytest.raises(UserError) as caught:
        decode(Options, {"hiden": 1}, "demo.toml", "model.options")
    assert caught.value.args == (
        "unknown key model.options.hiden",
        "demo.toml: model.options.hiden",
        "did you mean model.options.hidden?",
    )


def test_decode_missing_required_key_is_named():
    with pytest.raises(UserError) as caught:
        decode(Options, {}, "demo.toml", "model.options")
    assert caught.value.what == "Object missing required field `hidden`"
    assert caught.value.where == "demo.toml: model.options"


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        load(None).train.steps = 3  # type: ignore[misc]


def test_config_every_key_has_a_default():
    assert all(not field.required for field in msgspec.structs.fields(Config))


def test_load_list_key_given_as_a_word_says_it_must_be_a_list():
    with pytest.raises(UserError) as caught:
        load(None, ["data.sessions=t15.2023.08.11"])
    assert caught.value.what == "data.sessions is 't15.2023.08.11', expected a list, as [...]"
    assert caught.value.where == "--set data.sessions=t15.2023.08.11: data.sessions"
    assert caught.value.fix == "correct what is named"


def test_load_selection_is_read_back_equal():
    config = load(None, ['data.sessions=["t15.*"]', "data.blocks=[1, 2]", 'data.features=["55b"]', "data.folds=5"])
    assert (config.data.sessions, config.data.blocks, config.data.features) == (("t15.*",), (1, 2), ("55b",))
    assert loads(dumps(config), "run") == config
