"""The first look: every number that configuration, data and model must agree on, before a rank is started.

In: the configuration and the number of ranks. Out: findings, all at once, the most upstream first. It reads the
metadata of the groups and of a checkpoint, and builds the model without weights, so it takes a second and no memory.
What cannot be told because something before it is wrong is left out.
"""

import difflib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import nn

from xla_b2t.audit import resume
from xla_b2t.audit.environment import environment
from xla_b2t.audit.findings import Finding, finding_of, refuse
from xla_b2t.audit.resume import Resumed
from xla_b2t.audit.steps import enough_steps
from xla_b2t.config import Config
from xla_b2t.data.batch_plan import BatchPlan, plan_batches
from xla_b2t.data.group_layout import mismatches
from xla_b2t.data.groups import CONVERT, GroupSet, SplitIndex
from xla_b2t.data.phonemes import NUM_CLASSES
from xla_b2t.data.selection import open_selected
from xla_b2t.errors import UserError
from xla_b2t.models.build import build_without_weights, with_all_options
from xla_b2t.models.protocol import sizes_of
from xla_b2t.training.weights import check_use, read_checkpoint, weights_file

_KIND_OF = {
    "features": "input", "labels": "labels", "label_lengths": "labels", "required_steps": "labels", "days": "days",
}  # fmt: skip
"""The rule that a dataset of a group falls under; "groups" for the others."""
_CONFIGURATION = "configuration: "
"""Begins a place that is a key of the configuration, until it is known where that was given."""


def check(
    config: Config,
    num_ranks: int,
    resumed: Resumed | None = None,
    given: Callable[[str], str] | None = None,
) -> None:
    """Raises every finding of `numbers` as one UserError; returns when there is none."""
    refuse(numbers(config, num_ranks, resumed, given))


def numbers(
    config: Config,
    num_ranks: int,
    resumed: Resumed | None = None,
    given: Callable[[str], str] | None = None,
) -> list[Finding]:
    """Everything about a run that does not agree, as far as it shows without tracing a step.

    Args:
        config: the run's configuration.
        num_ranks: ranks that will be started.
        resumed: the run that is gone on with, None for a new one.
        given: tells of a key of the configuration where it was given; None says `configuration: KEY`.
    """
    found = environment(num_ranks)
    try:
        group_set = open_selected(config.data)
    except UserError as error:
        wrong = _model_by_name(config)
        found += [finding_of(error, "groups"), *wrong]
        if resumed and not wrong:
            found += _changed_keys(resumed, config)
    else:
        found += [*layout(group_set), *splits(config, group_set), *sizes(config, group_set), *lengths(group_set)]
        model, wrong = _model(config, group_set)
        found += wrong
        if model:
            found += enough_steps(config, group_set, model, _asked(config))
        plan, wrong = _plan(config, group_set, num_ranks)
        found += wrong
        if plan:
            found += enough_groups(group_set, num_ranks * plan.slots_per_update)
        if resumed:
            found += _resumed(resumed, config, group_set, model, plan)
        elif config.train.init_from and model:
            found += _begun_with(config, group_set)
    return [_placed(finding, given) for finding in dict.fromkeys(found)]


def layout(group_set: GroupSet) -> list[Finding]:
    """Every dataset of every group is stored as docs/FORMAT.md says."""
    try:
        found = mismatches(group_set)
    except UserError as error:
        return [finding_of(error, "groups")]
    return [
        Finding(
            _KIND_OF.get(mismatch.dataset, "groups"),
            f"{mismatch.dataset or 'groups'} of {mismatch.split}",
            mismatch.where,
            f"{mismatch.found} in {mismatch.groups} of {mismatch.of} groups",
            mismatch.expected,
            CONVERT,
        )
        for mismatch in found
    ]


def splits(config: Config, group_set: GroupSet) -> list[Finding]:
    """The splits that are trained and validated on exist and have labels."""
    here = ", ".join(group_set.splits) or "none"
    fix = "pre-batch a folder that has it"
    found = []
    for name in _asked(config):
        or_none = "" if name == "train" else ", or set validation.every=0"
        if name not in group_set.splits:
            near = difflib.get_close_matches(name, group_set.splits, n=1)
            where = f"{_CONFIGURATION}validation.split" if name != "train" else group_set.folder
            said = f"did you mean {near[0]}?" if near and name != "train" else fix + or_none
            found.append(Finding("split", name, where, f"no such split in {group_set.folder}", f"one of {here}", said))
        elif not len(group_set.splits[name].bucket_G):
            asked = [key for key in ("sessions", "blocks") if getattr(config.data, key)]
            where = f"{_CONFIGURATION}data.{asked[-1]}" if asked else group_set.folder
            more = f"give more data.sessions or data.blocks{or_none}"
            found.append(Finding("split", name, where, "no trial", "at least one that is asked for", more))
        elif not group_set.splits[name].labelled:
            found.append(Finding("split", name, group_set.splits[name].where, "no labels", "labels", fix + or_none))
    return found


def sizes(config: Config, group_set: GroupSet) -> list[Finding]:
    """Features, classes and days: of the configuration, of the manifest and of the index."""
    found = []
    wanted = config.data.num_features
    if wanted and wanted != group_set.num_features:
        found.append(
            Finding(
                "features",
                "data.num_features",
                f"{_CONFIGURATION}data.num_features",
                str(wanted),
                f"{group_set.num_features}, as in {group_set.folder}",
                f"set data.num_features={group_set.num_features}, or give groups of {wanted} features with data.dir",
            )
        )
    if group_set.num_classes != NUM_CLASSES:
        expected = f"{NUM_CLASSES}, the blank and the phonemes of xla_b2t/data/phonemes.py"
        found.append(Finding("classes", "num_classes", group_set.folder, str(group_set.num_classes), expected, CONVERT))
    found += [finding for index in group_set.splits.values() for finding in _label_range(group_set, index)]
    twice = sorted({session for session in group_set.sessions if group_set.sessions.count(session) > 1})
    if twice:
        expected = "each session once: its place is its day"
        found.append(Finding("days", "sessions", group_set.folder, f"{', '.join(twice)} twice", expected, CONVERT))
    return found


def lengths(group_set: GroupSet) -> list[Finding]:
    """Trials and labels fit into their buckets."""
    found = []
    for index in group_set.splits.values():
        bins_G = np.array([bucket.input_bins for bucket in group_set.buckets])[index.bucket_G]
        slots_G = np.array([bucket.label_slots for bucket in group_set.buckets])[index.bucket_G]
        for kind, table, values_GB, most_G, unit in (
            ("bucket", "input_bins", index.input_bins_GB, bins_G, "bins of its bucket"),
            ("labels", "label_lengths", index.label_lengths_GB, slots_G, "label slots of its bucket"),
        ):
            too_long_GB = values_GB > most_G[:, None]
            if too_long_GB.any():
                group, trial = np.argwhere(too_long_GB)[0]
                found.append(
                    Finding(
                        kind,
                        f"{int(too_long_GB.sum())} trials of {index.split}",
                        f"{index.where}/{table}",
                        f"{values_GB[group, trial]} in group {group} trial {trial}",
                        f"at most the {most_G[group]} {unit}",
                        CONVERT,
                    )
                )
    return found


def enough_groups(group_set: GroupSet, slots: int) -> list[Finding]:
    """Every rank gets a group in some update; with fewer groups than ranks some would train on nothing for ever."""
    if "train" not in group_set.splits:
        return []
    num_groups = min(np.bincount(group_set.splits["train"].pass_G), default=0)  # an epoch takes those of one pass
    if num_groups >= slots:
        return []
    return [
        Finding(
            "groups",
            "training groups",
            group_set.splits["train"].where,
            f"{num_groups} groups",
            f"at least {slots}, one for each rank and micro-step",
            "use fewer --cores, less train.accumulation, or pre-batch with a smaller --group-size",
        )
    ]


def _asked(config: Config) -> list[str]:
    """The splits that the run reads."""
    return list(dict.fromkeys(["train", *([config.validation.split] if config.validation.every else [])]))


def _label_range(group_set: GroupSet, index: SplitIndex) -> list[Finding]:
    """A class beyond the last would be taken for another on a core, where nothing checks it."""
    if index.max_label < group_set.num_classes:
        return []
    expected = f"at most {group_set.num_classes - 1}: there are {group_set.num_classes} classes"
    where = f"{index.where}/max_label"
    return [Finding("classes", f"labels of {index.split}", where, f"class {index.max_label}", expected, CONVERT)]


def _model_by_name(config: Config) -> list[Finding]:
    """What can be told of the model where the data, and so its sizes, are not known."""
    try:
        with_all_options(config)
    except UserError as error:
        return [finding_of(error, "model")]
    return []


def _model(config: Config, group_set: GroupSet) -> tuple[nn.Module | None, list[Finding]]:
    try:
        of_data = sizes_of(group_set)
        return build_without_weights(config.model, of_data), []
    except UserError as error:
        return None, [finding_of(error, "model")]


def _plan(config: Config, group_set: GroupSet, num_ranks: int) -> tuple[BatchPlan | None, list[Finding]]:
    try:
        return plan_batches(config, group_set.group_size, num_ranks), []
    except UserError as error:
        finding = finding_of(error, "batch")
        return None, [replace(finding, where=f"{_CONFIGURATION}{finding.where}")]


def _changed_keys(resumed: Resumed, config: Config) -> list[Finding]:
    try:
        return resume.changed_keys(resumed.config_path, config)
    except UserError as error:
        return [finding_of(error, "resume")]


def _resumed(
    resumed: Resumed, config: Config, group_set: GroupSet, model: nn.Module | None, plan: BatchPlan | None
) -> list[Finding]:
    is_told = model is None and not config.model.factory  # options that a model of ours does not take
    found = [] if is_told else _changed_keys(resumed, config)
    is_same_model = model is not None and not any(finding.name.startswith("model.") for finding in found)
    found += resume.changed_data(resumed, group_set.conversion, config.data.dir)
    if plan:
        found += resume.changed_batch(resumed, plan.global_batch)
    if resumed.checkpoint:
        found += resume.state(resumed.checkpoint, group_set, model if is_same_model else None)
    return found


def _begun_with(config: Config, group_set: GroupSet) -> list[Finding]:
    try:
        path = weights_file(config.train.init_from)
        check_use(read_checkpoint(path), str(path), config.model, group_set)
    except UserError as error:
        return [finding_of(error, "weights")]
    return []


def _placed(finding: Finding, given: Callable[[str], str] | None) -> Finding:
    """With the place where its key was given, in place of the key alone."""
    if given is None or not finding.where.startswith(_CONFIGURATION):
        return finding
    return replace(finding, where=given(finding.where.removeprefix(_CONFIGURATION).partition(",")[0]))
