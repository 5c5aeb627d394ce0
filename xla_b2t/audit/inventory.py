"""The first look: every number that configuration, data and model must agree on, before a rank is started.

In: the configuration and the number of ranks. Out: findings, all at once. It reads the metadata of the groups and
builds the model without weights (on the meta device), so it takes a second and no memory.
"""

import os

import numpy as np
import torch

from xla_b2t.audit.findings import Finding, refuse
from xla_b2t.audit.resume import Resumed, changed_data, changed_keys
from xla_b2t.config import Config
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.data.groups import GroupSet, SplitIndex, open_group_set
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import Sizes

_NAMED = 3
"""Trials that a finding names; the rest are counted."""


def check(config: Config, num_ranks: int, resumed: Resumed | None = None) -> None:
    """Raises every finding about a run as one UserError; returns when there is none.

    Args:
        config: the run's configuration.
        num_ranks: ranks that will be started.
        resumed: the run that is gone on with, None for a new one.
    """
    group_set = open_group_set(config.data.dir)
    refuse([*environment(), *splits(config, group_set)])
    plan = plan_batches(config, group_set.group_size, num_ranks)
    if resumed is not None:
        refuse(
            changed_keys(resumed.config_path, config)
            + changed_data(resumed, group_set.conversion, plan.global_batch, config.data.dir)
        )
    sizes = Sizes(group_set.num_features, len(group_set.sessions), group_set.num_classes)
    with torch.device("meta"):
        model = build_model(config.model, sizes)
    found = enough_groups(group_set, num_ranks * plan.accumulation)
    for name in dict.fromkeys(("train", config.validation.split)):
        index = group_set.splits.get(name)
        if index is not None and index.labelled:
            found += steps(model, group_set, index)
    refuse(found)


def environment() -> list[Finding]:
    """Variables that change dtypes behind torch's back."""
    return [
        Finding("environment", name, "environment", repr(os.environ[name]), "unset", f"unset {name}")
        for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
        if os.environ.get(name)
    ]


def splits(config: Config, group_set: GroupSet) -> list[Finding]:
    """The splits that are trained and validated on exist and have labels."""
    asked = ["train", *([config.validation.split] if config.validation.every else [])]
    here = ", ".join(group_set.splits) or "none"
    fix = "pre-batch a folder that has it" + ("" if asked == ["train"] else ", or set validation.every=0")
    found = []
    for name in asked:
        if name not in group_set.splits:
            found.append(Finding("split", name, group_set.folder, here, name, fix))
        elif not group_set.splits[name].labelled:
            found.append(Finding("split", name, group_set.splits[name].path, "no labels", "labels", fix))
    return found


def enough_groups(group_set: GroupSet, slots: int) -> list[Finding]:
    """Every rank gets a group in some update; with fewer groups than ranks some would train on nothing for ever."""
    num_groups = len(group_set.splits["train"].bucket_G)
    if num_groups >= slots:
        return []
    return [
        Finding(
            "groups",
            "training groups",
            group_set.splits["train"].path,
            f"{num_groups} groups",
            f"at least {slots}, one for each rank and micro-step",
            "use fewer --cores, less train.accumulation, or pre-batch with a smaller --group-size",
        )
    ]


def steps(model: torch.nn.Module, group_set: GroupSet, index: SplitIndex) -> list[Finding]:
    """Every trial is long enough for the model, and for its labels: otherwise no alignment exists and the loss is not
    finite."""
    valid_GB = index.input_bins_GB > 0
    lengths = np.unique(index.input_bins_GB[valid_GB])
    steps_of = {int(length): model.output_steps(int(length)) for length in lengths}
    steps_GB = np.vectorize(lambda bins: steps_of.get(int(bins), 0), otypes=[np.int64])(index.input_bins_GB)
    impossible_GB = valid_GB & (steps_GB < np.maximum(index.required_steps_GB, 1))
    if not impossible_GB.any():
        return []
    places = np.argwhere(impossible_GB)
    examples = ", ".join(
        f"group {group} trial {trial} has {steps_GB[group, trial]} steps for {index.required_steps_GB[group, trial]}"
        for group, trial in places[:_NAMED]
    )
    return [
        Finding(
            "labels",
            f"{len(places)} trials of {index.split}",
            index.path,
            examples + (" ..." if len(places) > _NAMED else ""),
            "at least as many output steps as labels and adjacent repeats",
            f"pre-batch again with --patch-bins and --patch-stride of the model (now {group_set.patch_bins} and "
            f"{group_set.patch_stride}): such trials are then refused and counted",
        )
    ]
