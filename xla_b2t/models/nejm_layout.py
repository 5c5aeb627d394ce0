"""The weights of `gru_decoder` under the names of the published baseline, and the other way round.

In and out: tensors by name. There, each day has a weight and a bias of its own, and `torch.compile` or `DataParallel`
has put a prefix before every name; everything else is named, shaped and ordered as here. Files are left to
`training/nejm.py`.

Source: Neuroprosthetics-Lab/nejm-brain-to-text, the state of its `GRUDecoder` as its training saves it.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xla_b2t.errors import UserError

COMPILED = "_orig_mod."
"""What `torch.compile` puts before a name. Its evaluation strips it, and its own training asks for it."""

_PREFIXES = re.compile(r"^(?:_orig_mod\.|module\.)+")
_DAY_LISTS = {"day_weights": "day.day_weight", "day_biases": "day.day_bias"}


def to_nejm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `gru_decoder` as that model's state.

    Args:
        weights: float32, by our names; days stacked, (D, C, C) and (D, C).

    Returns:
        float32, each with storage of its own: for day N `day_weights.N` (C, C) and `day_biases.N` (1, C).
    """
    theirs = {name: tensor for name, tensor in weights.items() if name not in _DAY_LISTS.values()}
    for day, (weight_CC, bias_C) in enumerate(zip(weights["day.day_weight"], weights["day.day_bias"], strict=True)):
        theirs |= {f"day_weights.{day}": weight_CC, f"day_biases.{day}": bias_C.unsqueeze(0)}
    return {f"{COMPILED}{name}": tensor.clone() for name, tensor in theirs.items()}


def from_nejm(state: Any, num_days: int, where: str) -> dict[str, Tensor]:
    """That model's state as weights of `gru_decoder`, in its order of days.

    Args:
        state: tensors by its names, with or without prefixes; from a file, so it may be anything.
        num_days: D, the sessions that its settings name.
        where: the file, for errors.

    Returns:
        float32, by our names; whether they fit a model is for the caller to check.

    Raises:
        UserError: it is not tensors by name; its day layers are not one weight (C, C) and one bias (1, C) for each
            session.
    """
    _check_named_tensors(state, where)
    named = {_PREFIXES.sub("", name): tensor for name, tensor in state.items()}
    lists: dict[str, dict[int, Tensor]] = {list_name: {} for list_name in _DAY_LISTS}
    weights = {}
    for name, tensor in named.items():
        list_name, _, day = name.partition(".")
        if list_name in lists and day.isdecimal():
            lists[list_name][int(day)] = tensor.float()
        else:
            weights[name] = tensor.float()
    for list_name, by_day in lists.items():
        if sorted(by_day) != list(range(num_days)):
            raise UserError(
                f"{len(by_day)} {list_name}, and {num_days} sessions in its settings",
                where,
                "give a checkpoint and the args.yaml that was saved with it",
            )
        shapes = {tuple(tensor.shape) for tensor in by_day.values()}
        is_bias = list_name == "day_biases"
        if len(shapes) > 1 or any(len(shape) != 2 or (is_bias and shape[0] != 1) for shape in shapes):
            raise UserError(
                f"{list_name} of the shapes {sorted(shapes)}, expected one, {'(1, C)' if is_bias else '(C, C)'}",
                where,
                "give a checkpoint of the published baseline",
            )
        days = [by_day[day] for day in range(num_days)]
        weights[_DAY_LISTS[list_name]] = torch.cat(days) if is_bias else torch.stack(days)
    return weights


def _check_named_tensors(state: Any, where: str) -> None:
    found = "" if isinstance(state, Mapping) else f"a {type(state).__name__}"
    if not found:
        others = [
            f"{type(value).__name__} under {name!r}"
            for name, value in state.items()
            if not (isinstance(name, str) and isinstance(value, Tensor))
        ]
        found = others[0] if others else ""
    if found:
        raise UserError(
            f"its weights are not tensors by name: found {found}", where, "give a checkpoint of the published baseline"
        )
