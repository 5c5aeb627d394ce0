"""Builds a model without weights and remembers where each of its tensors comes from.

In: the configuration and the sizes of the data. Out: a `Construction`: the model on the `meta` device, and the lines of
Python that registered its parameters and buffers and assigned its attributes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from xla_b2t.audit.lines import line_here
from xla_b2t.config import ModelConfig
from xla_b2t.models.build import build_without_weights
from xla_b2t.models.protocol import Sizes


@dataclass(frozen=True)
class Construction:
    """A model and its origins.

    Attributes:
        model: on the `meta` device, or on the CPU where its maker needs values.
        lines: `file:line` by the module's id and the name of the parameter, buffer, submodule or attribute.
        changed: what of torch's own defaults its file would change, in words, with the line; they are as they were.
    """

    model: nn.Module
    lines: dict[tuple[int, str], str]
    changed: tuple[tuple[str, str], ...] = ()

    def line_of(self, name: str) -> str:
        """Where a parameter, buffer or submodule was registered, by its name in the model."""
        return self.lines.get(self._key(name), "")

    def order_of(self, name: str) -> int:
        """How many were registered before it."""
        keys = list(self.lines)
        return keys.index(self._key(name)) if self._key(name) in self.lines else -1

    def _key(self, name: str) -> tuple[int, str]:
        path, _, attribute = name.rpartition(".")
        return id(self.model.get_submodule(path)), attribute


def construct(config: ModelConfig, sizes: Sizes) -> Construction:
    """Builds the model; errors as of `models.build.build_model`."""
    lines: dict[tuple[int, str], str] = {}
    changed: list[tuple[str, str]] = []

    def note(module: nn.Module, name: str, _: Any) -> None:
        lines[(id(module), name)] = line_here()

    plain_setattr: Callable[..., None] = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Tensor | list | tuple | dict | set) and not isinstance(value, nn.Parameter):
            lines[(id(module), name)] = line_here()
        plain_setattr(module, name, value)

    with ExitStack() as stack:
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            stack.callback(register(note).remove)
        stack.enter_context(mock.patch.object(nn.Module, "__setattr__", set_attribute))
        stack.enter_context(mock.patch.object(torch, "set_default_device", _noted(changed, "device")))
        stack.enter_context(mock.patch.object(torch, "set_default_dtype", _noted(changed, "dtype")))
        model = build_without_weights(config, sizes)
    return Construction(model, lines, tuple(dict.fromkeys(changed)))


def _noted(changed: list[tuple[str, str]], what: str) -> Callable[[Any], None]:
    """In the place of a function that changes a default of torch: notes who asks for it, and changes nothing."""

    def note(value: Any) -> None:
        changed.append((f"{what} {value}", line_here()))

    return note
