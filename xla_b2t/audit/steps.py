"""How many steps a model makes of a trial, and whether they are enough to spell its label.

In: a model, with or without weights, and the lengths of the trials. Out: findings. Whether `forward` really gives as
many steps as `output_steps` promises shows when a step is traced.
"""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

from xla_b2t.audit.findings import Finding, finding_of
from xla_b2t.config import Config
from xla_b2t.data.groups import GroupSet, SplitIndex
from xla_b2t.errors import UserError, line_of
from xla_b2t.models.build import build_model
from xla_b2t.models.protocol import sizes_of

_NAMED = 3
"""Trials that a finding names; the rest are counted."""


def enough_steps(config: Config, group_set: GroupSet, model: nn.Module, splits: Sequence[str]) -> list[Finding]:
    """Every trial is long enough for the model, and for its labels.

    Args:
        config: the run's configuration.
        group_set: the data.
        model: built for it, with or without weights.
        splits: those that the run reads, as far as they are there.
    """
    indices = [group_set.splits[name] for name in splits if name in group_set.splits]
    found = [finding for index in indices for finding in _shorter_than_patch(config, model, index)]
    steps_T, wrong = promised_steps(config, group_set, model, indices)
    if wrong:
        return [*found, *wrong]
    return found + [
        finding for index in indices if index.labelled for finding in _enough_for_labels(steps_T, group_set, index)
    ]


def promised_steps(
    config: Config, group_set: GroupSet, model: nn.Module, indices: Sequence[SplitIndex]
) -> tuple[dict[int, int], list[Finding]]:
    """The steps of a trial by its bins, for every length that will be asked for; or what is wrong with the rule.

    It must give integers, and no fewer for a longer trial.
    """
    lengths = {bucket.input_bins for bucket in group_set.buckets}
    lengths |= {int(bins) for index in indices for bins in np.unique(index.input_bins_GB) if bins}
    if config.augment.start_shift_bins:  # the augmentation asks for every length, to see how much a trial can spare
        lengths = set(range(max(lengths, default=0) + 1))
    steps, wrong = _ask(config, model, sorted(lengths))
    if wrong and config.model.factory and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        # It may count with the values of a buffer, which are not there without weights.
        sizes = sizes_of(group_set)
        try:
            model = build_model(config.model, sizes, seed=0)
        except UserError as error:
            return {}, [finding_of(error, "model")]
        steps, wrong = _ask(config, model, sorted(lengths))
    return steps, wrong


def _ask(config: Config, model: nn.Module, lengths: list[int]) -> tuple[dict[int, int], list[Finding]]:
    file, where = _place(config, model)
    steps: dict[int, int] = {}
    before = None

    def wrong(bins: int, found: str, expected: str, fix: str, where: str = where) -> tuple[dict, list[Finding]]:
        name = f"output_steps({bins}) of {type(model).__name__}"
        return {}, [Finding("model", name, where, found, expected, fix)]

    for bins in lengths:
        try:
            given = model.output_steps(bins)
        except UserError as error:
            return wrong(bins, error.what, "a number of steps", error.fix, error.where)
        except Exception as error:
            line = line_of(error, file) if file else where
            return wrong(bins, f"{type(error).__name__}: {error}", "a number of steps", "correct the line", line)
        if isinstance(given, bool) or not isinstance(given, int | np.integer):
            return wrong(
                bins, f"{given!r}, a {type(given).__name__}", "an int", "return a Python int: count with // and int()"
            )
        if before is not None and given < steps[before]:
            return wrong(
                bins,
                f"{given} steps, and {steps[before]} for {before} bins",
                "no fewer for a longer trial",
                "correct the rule",
            )
        steps[bins], before = int(given), bins
    return steps, []


def _place(config: Config, model: nn.Module) -> tuple[Path | None, str]:
    """The file of the model's `output_steps`, as the user named it, and the line where it is defined."""
    function = inspect.unwrap(getattr(type(model), "output_steps", None) or model.output_steps)
    code = getattr(function, "__code__", None)
    if code is None:
        file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
        return (Path(file) if file else None), f"output_steps of {type(model).__name__}"
    file = Path(code.co_filename)
    named = Path(config.model.factory.rpartition(":")[0])
    file = named if named.absolute() == file else file
    return file, f"{file}:{code.co_firstlineno}"


def _shorter_than_patch(config: Config, model: nn.Module, index: SplitIndex) -> list[Finding]:
    """Our models take whole patches alone; a shorter trial would be padding for the most part."""
    patch_bins = getattr(getattr(model, "options", None), "patch_bins", None)
    if config.model.factory or not patch_bins:
        return []
    short_GB = (index.input_bins_GB > 0) & (index.input_bins_GB < patch_bins)
    if not short_GB.any():
        return []
    group, trial = np.argwhere(short_GB)[0]
    return [
        Finding(
            "patch",
            f"{int(short_GB.sum())} trials of {index.split}",
            index.where,
            f"{index.input_bins_GB[group, trial]} bins in group {group} trial {trial}",
            f"at least the {patch_bins} of model.options.patch_bins",
            f"lower model.options.patch_bins, or pre-batch again with --patch-bins {patch_bins}: such trials are then "
            "refused and counted",
        )
    ]


def _enough_for_labels(steps_of: dict[int, int], group_set: GroupSet, index: SplitIndex) -> list[Finding]:
    """Otherwise no alignment exists and the loss is not finite."""
    valid_GB = index.input_bins_GB > 0
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
            index.where,
            examples + (" ..." if len(places) > _NAMED else ""),
            "at least as many output steps as labels and adjacent repeats",
            f"pre-batch again with --patch-bins and --patch-stride of the model (now {group_set.patch_bins} and "
            f"{group_set.patch_stride}): such trials are then refused and counted. Or give the model a smaller stride",
        )
    ]
