"""Whether a run may go on: each thing that would make another run of it, or that its state lacks."""

import dataclasses

import pytest
import torch

from xla_b2t import config as configuration
from xla_b2t.audit import resume
from xla_b2t.audit.findings import Finding
from xla_b2t.audit.resume import Resumed, changed_batch, changed_data, changed_keys
from xla_b2t.data.groups import open_group_set
from xla_b2t.models.build import build_model, build_without_weights
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training.checkpoint import Checkpoint, CheckpointFolder
from xla_b2t.training.step import initial_state

KEYS = [
    "model.options.hidden=6",
    "model.options.layers=1",
    "model.options.patch_bins=4",
    "model.options.patch_stride=2",
]
ANEW = "go on from a checkpoint as train wrote it, or begin a run with these weights: --set train.init_from="
NEW_RUN = "begin another run with --set run.dir="


@pytest.fixture(scope="module")
def group_set(small_groups):
    return open_group_set(small_groups)


@pytest.fixture(scope="module")
def sizes(group_set):
    return sizes_of(group_set)


@pytest.fixture
def model(sizes):
    return build_without_weights(configuration.load(None, KEYS).model, sizes)


@pytest.fixture
def save(group_set, sizes, tmp_path):
    """Saves a checkpoint of a run on these groups, its fields and columns of its state changed, and gives its file."""

    def write(fields=None, keys=(), **columns):
        config = configuration.load(None, [*KEYS, *keys])
        state = initial_state(build_model(config.model, sizes, seed=1))
        for column, change in columns.items():
            state = dataclasses.replace(state, **{column: change(dict(getattr(state, column)))})
        checkpoint = Checkpoint(
            7, state, configuration.dumps(config), group_set.conversion, 16, group_set.sessions,
            group_set.num_features, group_set.num_classes,
        )  # fmt: skip
        return str(CheckpointFolder(tmp_path / "run").save(dataclasses.replace(checkpoint, **fields or {}), True))

    return write


@pytest.mark.parametrize("is_built", [True, False])
def test_state_of_this_run_has_no_finding(save, group_set, model, is_built):
    assert resume.state(save(), group_set, model if is_built else None) == []


def test_state_leaves_its_tensors_in_the_file(save, group_set, model, monkeypatch):
    path = save()
    seen = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: seen.append(options) or load(*args, **options))
    assert resume.state(path, group_set, model) == []
    assert [options["mmap"] for options in seen] == [True]


def test_state_without_a_parameter_names_it(save, group_set, model):
    path = save(**{column: without("h0") for column in ("weights", "moment1", "moment2")})
    assert resume.state(path, group_set, model) == [
        Finding(
            "resume",
            "h0",
            path,
            "nothing in the checkpoint",
            "(1, 1, 6), as in the model",
            f"give the model that the run began with, or {NEW_RUN}",
        )
    ]


def without(name):
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def test_state_with_parameters_that_the_model_lacks_names_some_and_counts_the_rest(save, group_set, model):
    extra = {f"extra{number}": torch.zeros(2) for number in range(5)}
    path = save(**{column: lambda tensors: tensors | extra for column in ("weights", "moment1", "moment2")})
    (found,) = resume.state(path, group_set, model)
    assert found.name == "extra0, extra1, extra2 and 2 more"
    assert (found.found, found.where) == ("(2,) in the checkpoint", path)
    assert found.expected == "nothing, as in the model"
    assert found.fix == f"give the model that the run began with, or {NEW_RUN}"


def test_state_with_a_parameter_of_another_shape_gives_both(save, group_set, model):
    path = save(**{
        column: lambda tensors: tensors | {"out.bias": torch.zeros(7)} for column in ("weights", "moment1", "moment2")
    })  # fmt: skip
    (found,) = resume.state(path, group_set, model)
    assert (found.kind, found.name, found.where) == ("resume", "out.bias", path)
    assert (found.found, found.expected) == ("(7,) in the checkpoint", "(41,), as in the model")


def test_state_with_a_parameter_that_was_trained_and_is_frozen_now_says_so(save, group_set, model):
    model.out.bias.requires_grad_(False)
    (found,) = resume.state(save(), group_set, model)
    assert (found.name, found.found, found.expected) == (
        "out.bias", "trained in the checkpoint", "fixed, as in the model"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [(without("out.bias"), "nothing"), (lambda tensors: tensors | {"out.bias": torch.zeros(5)}, "(5,)")],
)
def test_state_with_a_moment_that_is_not_of_its_weight_names_both(save, group_set, model, change, found):
    path = save(moment2=change)
    assert resume.state(path, group_set, model) == [
        Finding("resume", "moment2 of out.bias", path, found, "(41,)", ANEW + path)
    ]


@pytest.mark.parametrize(("column", "what"), [("weights", "master"), ("moment1", "moment1"), ("moment2", "moment2")])
def test_state_in_another_dtype_names_the_tensor_and_both_dtypes(save, group_set, model, column, what):
    path = save(**{column: lambda tensors: tensors | {"h0": tensors["h0"].bfloat16()}})
    assert resume.state(path, group_set, model) == [
        Finding(
            "resume",
            f"{what} of h0",
            path,
            "bfloat16",
            "float32",
            ANEW + path,
        )
    ]


def test_state_all_in_bfloat16_is_one_finding_a_column_whatever_the_model(save, group_set):
    def narrow(tensors):
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}

    found = resume.state(save(weights=narrow, moment1=narrow, moment2=narrow), group_set, None)
    assert [(each.name.partition(" ")[0], each.found) for each in found] == [
        ("master", "bfloat16"), ("moment1", "bfloat16"), ("moment2", "bfloat16"),
    ]  # fmt: skip
    assert found[0].name.endswith(" more")


@pytest.mark.parametrize(("field", "name", "here"), [("num_features", "features", 16), ("num_classes", "classes", 41)])
def test_state_of_other_sizes_gives_both_and_no_shapes(save, group_set, model, field, name, here):
    path = save({field: here + 3}, weights=without("h0"), moment1=without("h0"), moment2=without("h0"))
    (found,) = resume.state(path, group_set, model)
    assert (found.kind, found.name, found.where) == ("resume", name, path)
    assert found.found == f"{here} in the groups"
    assert found.expected == f"{here + 3}, on which this run was trained"
    assert found.fix == f"give the groups that the run began with: --set data.dir=, or {NEW_RUN}"


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        (lambda of: of[::-1], "2 sessions, day 0 is {0}", "2 sessions, day 0 is {1}"),
        (lambda of: of[:1], "2 sessions, day 1 is {1}", "1 sessions, day 1 is none"),
        (lambda of: (*of, "later"), "2 sessions, day 2 is none", "3 sessions, day 2 is later"),
    ],
)
def test_state_of_other_sessions_names_the_first_day_that_differs(save, group_set, model, change, found, expected):
    sessions = group_set.sessions
    path = save({"sessions": change(sessions)})
    (finding,) = resume.state(path, group_set, model)
    assert (finding.name, finding.where) == ("days", path)
    assert finding.found == found.format(*sessions) + " in the groups"
    assert finding.expected == expected.format(*sessions) + ", on which it was trained"


def test_state_in_a_damaged_file_is_a_finding(group_set, model, tmp_path):
    path = tmp_path / "step.pt"
    path.write_bytes(b"nothing")
    (found,) = resume.state(str(path), group_set, model)
    assert found.kind == "resume"
    assert found.found.startswith("step.pt is not a whole checkpoint")
    assert (found.where, found.expected) == (str(path), "")


def test_changed_keys_leave_what_may_change_alone(tmp_path):
    before = configuration.load(None, KEYS)
    (tmp_path / "config.toml").write_text(configuration.dumps(before))
    place = str(tmp_path / "config.toml")
    same = [*KEYS, "data.num_features=16", "train.steps=7", "optimizer.sharded=true", "model.options.kernel=false"]
    assert changed_keys(place, configuration.load(None, same)) == []
    assert changed_keys(place, configuration.load(None, [*KEYS, "optimizer.eps=0.2"])) == [
        Finding(
            "resume",
            "optimizer.eps",
            place,
            "0.2",
            "0.1, with which this run began",
            f"leave optimizer.eps as it was, or {NEW_RUN}",
        )
    ]


def test_changed_data_and_batch_of_the_same_run_are_none():
    resumed = Resumed("config.toml", "abc", 16)
    assert changed_data(resumed, "abc", "groups") == changed_batch(resumed, 16) == []
    assert changed_data(resumed, "xyz", "groups") == [
        Finding(
            "resume",
            "data.dir",
            "groups",
            "groups of the conversion xyz",
            "abc, with which this run began",
            "give the groups that the run began with: --set data.dir=",
        )
    ]
    (found,) = changed_batch(resumed, 24)
    assert (found.name, found.where, found.found) == ("trials an update", "config.toml", "24")
    assert found.expected == "16, with which this run began"
    assert found.fix.startswith("set train.global_batch=16, ")
