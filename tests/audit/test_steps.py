"""The steps that a model makes of every trial: a rule that holds, and enough of them for the labels."""

import pytest

from xla_b2t import config as configuration
from xla_b2t.audit.steps import enough_steps
from xla_b2t.data.groups import open_group_set
from xla_b2t.models.build import build_without_weights
from xla_b2t.models.protocol import sizes_of

OURS = [
    "model.options.hidden=8",
    "model.options.layers=1",
    "model.options.patch_bins=4",
    "model.options.patch_stride=2",
]
FAILS = ("a number of steps", "correct the line")
SHRINKS = ("no fewer for a longer trial", "correct the rule")
NO_INT = ("an int", "return a Python int: count with // and int()")


def load(groups, *keys):
    return configuration.load(None, ["train.batch_size=8", f"data.dir={groups}", *keys])


def findings(config, *splits):
    group_set = open_group_set(config.data.dir)
    sizes = sizes_of(group_set)
    return enough_steps(config, group_set, build_without_weights(config.model, sizes), splits or ("train", "val"))


def users_model(folder, output_steps, init="pass"):
    """A file with a user's decoder whose `output_steps` is the given lines; they begin at line 9."""
    path = folder / "my_model.py"
    path.write_text(
        "import torch\n\n\nclass Mine(torch.nn.Module):\n"
        f"    def __init__(self):\n        super().__init__(); {init}\n"
        "    forward = None.__init__\n"
        "    def output_steps(self, input_bins):\n"
        + "".join(f"        {line}\n" for line in output_steps)
        + "\n\ndef build(sizes, options):\n    return Mine()\n"
    )
    return f"model.factory={path}:build"


def test_steps_of_our_model_and_its_own_groups_are_enough(small_groups):
    assert findings(load(small_groups, *OURS)) == []


def test_steps_of_too_coarse_a_stride_count_the_trials_of_labelled_splits_alone(small_groups):
    found = findings(load(small_groups, *OURS, "model.options.patch_stride=12"), "train", "val", "test", "dev")
    assert [finding.name.partition(" of ")[2] for finding in found] == ["train", "val"]
    assert (found[0].kind, found[0].where) == ("labels", f"{small_groups}/index.h5:/train")
    assert found[0].found.startswith("group 0 trial 0 has ") and found[0].found.endswith(" ...")
    assert found[0].expected == "at least as many output steps as labels and adjacent repeats"
    assert "--patch-bins and --patch-stride of the model (now 4 and 2)" in found[0].fix


def test_steps_with_a_patch_longer_than_trials_count_them(small_groups):
    index = open_group_set(small_groups).splits["train"]
    shortest = int(index.input_bins_GB[index.input_bins_GB > 0].min())
    found = findings(load(small_groups, *OURS, f"model.options.patch_bins={shortest + 1}"))[0]
    assert (found.kind, found.name, found.where) == ("patch", "1 trials of train", index.where)
    assert found.found.startswith(f"{shortest} bins in group ")
    assert found.expected == f"at least the {shortest + 1} of model.options.patch_bins"
    assert found.fix.startswith(f"lower model.options.patch_bins, or pre-batch again with --patch-bins {shortest + 1}")
    config = load(small_groups, *OURS, f"model.options.patch_bins={shortest}")
    assert "patch" not in [each.kind for each in findings(config)]


def test_steps_of_a_users_model_that_keeps_the_protocol_are_no_finding(small_groups, tmp_path):
    assert findings(load(small_groups, users_model(tmp_path, ["return input_bins // 2"]))) == []


def test_steps_of_a_users_model_that_reads_values_back_are_no_finding(small_groups, tmp_path):
    """On the meta device there is nothing to read: neither in the constructor nor, later, in a buffer."""
    factory = users_model(tmp_path, ["return input_bins // self.by"], "self.by = int(torch.ones(2).sum().item())")
    assert findings(load(small_groups, factory)) == []
    init = "self.register_buffer('by', torch.tensor(2))"
    assert findings(load(small_groups, users_model(tmp_path, ["return input_bins // int(self.by)"], init))) == []


@pytest.mark.parametrize(
    ("lines", "line", "bins", "found", "expected", "fix"),
    [
        (["a = 1", "return a // (input_bins - 3)"], 10, 3, "ZeroDivisionError: ", *FAILS),
        (["return input_bins / 2"], 8, 0, "0.0, a float", *NO_INT),
        (["return torch.tensor(input_bins)"], 8, 0, "tensor(", *NO_INT),
        (["return None"], 8, 0, "None, a NoneType", *NO_INT),
        (["return 50 - input_bins"], 8, 1, "49 steps, and 50 for 0 bins", *SHRINKS),
    ],
)  # fmt: skip
def test_steps_of_a_users_model_with_broken_output_steps_name_its_line(
    small_groups, tmp_path, lines, line, bins, found, expected, fix
):
    factory = users_model(tmp_path, lines)
    (finding,) = findings(load(small_groups, factory))
    assert (finding.kind, finding.name) == ("model", f"output_steps({bins}) of Mine")
    assert finding.found.startswith(found)
    assert (finding.expected, finding.fix) == (expected, fix)
    assert finding.where == f"{tmp_path}/my_model.py:{line}"


def test_steps_of_a_users_model_that_cannot_take_short_trials_ask_for_those_there_are(small_groups, tmp_path):
    """The augmentation asks for every length; without a shift nobody does."""
    lines = ["assert input_bins > 5, 'too short'", "return input_bins"]
    config = load(small_groups, users_model(tmp_path, lines), "augment.start_shift_bins=0")
    assert findings(config) == []
    (found,) = findings(load(small_groups, users_model(tmp_path, lines)))
    assert (found.found, found.where) == ("AssertionError: too short", f"{tmp_path}/my_model.py:9")
