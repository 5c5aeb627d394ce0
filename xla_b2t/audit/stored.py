"""The first look at tensors: every parameter, buffer, optimizer tensor and input, against the dtype policy.

In: a model without weights, and what the trainer made of it. Out: findings, in the order of the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from xla_b2t.audit.construction import Construction
from xla_b2t.audit.findings import Finding
from xla_b2t.audit.operation import dtype_name
from xla_b2t.config import Config
from xla_b2t.models.policy import COUNTS, FORBIDDEN, STATE, kept_exception
from xla_b2t.training.optimizer import Slot, kind_of
from xla_b2t.xla.feed import DeviceBatch

_DEEP = 3
"""How far containers in containers are searched for tensors and modules."""


def arrival(made: Construction, config: Config) -> list[Finding]:
    """A model as its maker gave it: one dtype throughout, everything registered, nothing parted by the core."""
    looks = (_changed_defaults(made), _strange(made), _dtypes(made, config), _unregistered(made),
             _shared(made, config), _exceptions(made, config))  # fmt: skip
    return [finding for look in looks for finding in look]


def exceptions(model: nn.Module, config: Config) -> tuple[str, ...]:
    """What the configuration keeps in float32, in words, each with its pattern."""
    return tuple(
        f"{name} stays float32 (model.keep_float32 {pattern!r})"
        for name, tensor in _named(model)
        if tensor.is_floating_point() and (pattern := kept_exception(name, config.model))
    )


def optimizer_state(slots: Sequence[Slot], totals: Sequence[Tensor], model: nn.Module) -> list[Finding]:
    """Masters, moments and totals in float32, and for every trained parameter of the model the slot that trains it."""
    findings = []
    for slot in slots:
        for role in ("master", "moment1", "moment2"):
            tensor = getattr(slot, role)
            if tensor is None or tensor.dtype != STATE:
                found = "none" if tensor is None else dtype_name(tensor.dtype)
                fix = "give the optimizer a float32 copy: an update of a bfloat16 weight is lost to rounding"
                findings.append(Finding("dtype", f"{role} of {slot.name}", "optimizer", found, dtype_name(STATE), fix))
    wide = [tensor for tensor in totals if tensor.dtype != STATE]
    if wide:
        fix = "sum losses and gradients in float32"
        findings.append(Finding("dtype", "totals", "optimizer", dtype_name(wide[0].dtype), dtype_name(STATE), fix))
    trained = {slot.name: slot.parameter for slot in slots}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and trained.get(name) is not parameter:
            found = "another tensor than the model computes with" if name in trained else "nothing"
            fix = "let the optimizer take the parameters after the last .to(), .bfloat16() or .half() of the model"
            findings.append(
                Finding("optimizer", name, "optimizer", found, "the model's own parameter for every slot", fix)
            )
    return findings


def inputs(batch: DeviceBatch, controls_N: Tensor, where: str) -> list[Finding]:
    """What travels to the core with every step."""
    expected = dict.fromkeys(DeviceBatch._fields, COUNTS) | {"valid_B": torch.bool, "features_BTC": torch.bfloat16}
    tensors = {**batch._asdict(), "learning rate and flags": controls_N}
    expected["learning rate and flags"] = STATE
    return [
        Finding("input", name, where, dtype_name(tensor.dtype), dtype_name(expected[name]), "convert it on the host")
        for name, tensor in tensors.items()
        if tensor.dtype != expected[name]
    ]


def _changed_defaults(made: Construction) -> Iterator[Finding]:
    for default, line in made.changed:
        fix = f"take it away: the trainer sees to dtypes and devices, {line}"
        yield Finding("default", "torch", line, f"torch's default {default}", "torch's defaults left as they are", fix)


def _strange(made: Construction) -> Iterator[Finding]:
    """What a trainer would drop in silence, or cannot bring to a core."""
    for name, module in made.model.named_modules():
        where = made.line_of(name) if name else "model"
        if isinstance(module, torch.jit.ScriptModule):
            fix = "leave torch.jit away: the whole step is compiled for the core anyway"
            yield Finding("compiled", name or "model", where, "a module of TorchScript", "plain PyTorch", fix)
        elif type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None):
            fix = "leave torch.compile away: the whole step is compiled for the core anyway"
            yield Finding("compiled", name or "model", where, "a module of torch.compile", "plain PyTorch", fix)
    for name, tensor in _named(made.model):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            fix = "give the module its sizes: Sizes has those of the data"
            yield Finding("lazy", name, made.line_of(name), "a lazy parameter without a shape", "a shape", fix)
        elif tensor.is_complex():
            fix = "keep the real and the imaginary part, as two parameters"
            yield Finding("dtype", name, made.line_of(name), dtype_name(tensor.dtype), "a real dtype", fix)
        elif tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            fix = "do what the hook does in forward, in an autograd.Function"
            found = "a hook on its gradient, which the trainer would drop"
            yield Finding("hook", name, made.line_of(name), found, "no hooks on parameters", fix)


def _dtypes(made: Construction, config: Config) -> Iterator[Finding]:
    """Tensors of another dtype than the rest; who mixes them means something that a trainer cannot know."""
    floats = {name: tensor for name, tensor in _named(made.model) if tensor.is_floating_point()}
    fix = "return the model as it was made, in float32: the trainer brings it to model.dtype; what is to stay float32 "
    fix += "is named in model.keep_float32"
    counts: dict[torch.dtype, int] = {}
    for name, tensor in floats.items():
        if tensor.dtype in FORBIDDEN:
            mend = f"make it in float32: .float() or dtype=torch.float32{_at(made.line_of(name))}"
            yield Finding("dtype", name, made.line_of(name), dtype_name(tensor.dtype), "float32", mend)
        elif not kept_exception(name, config.model):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    if len(counts) < 2:
        return
    # With as many of both, the narrow ones are what somebody converted, and the wide ones what was left.
    most = max(counts, key=lambda dtype: (counts[dtype], dtype != torch.float32))
    for name, tensor in floats.items():
        if tensor.dtype in counts and tensor.dtype != most and not kept_exception(name, config.model):
            expected = f"{dtype_name(most)}, as the other {counts[most]}"
            yield Finding("dtype", name, made.line_of(name), dtype_name(tensor.dtype), expected, fix)


def _unregistered(made: Construction) -> Iterator[Finding]:
    known = {id(module) for module in made.model.modules()}
    known |= {id(tensor) for _, tensor in _named(made.model)}
    for path, module in made.model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _INTERNAL or attribute.startswith("_flat_weight"):
                continue
            lost = [found for found in _inside(value, _DEEP) if id(found) not in known]
            if not lost:
                continue
            name = f"{path}.{attribute}" if path else attribute
            where = made.lines.get((id(module), attribute), "") or f"model: {name}"
            kinds = sorted({_kind(found) for found in lost})
            found = f"{len(lost)} {' and '.join(kinds)} in a plain {type(value).__name__}"
            if isinstance(value, Tensor):
                found = f"a plain tensor, {dtype_name(value.dtype)}"
            expected = "registered, so that the trainer moves, converts, trains and saves it"
            fix = "use nn.ModuleList, nn.ParameterList or nn.ParameterDict"
            if kinds == ["tensors"]:
                fix = f'use self.register_buffer("{attribute}", ..., persistent=False)'
            yield Finding("unregistered", name, where, found, expected, fix)


_INTERNAL = frozenset(vars(nn.Module()))


def _inside(value: Any, depth: int) -> Iterator[Tensor | nn.Module]:
    if isinstance(value, Tensor):
        if value.grad_fn is None:  # a computed value follows its parameters
            yield value
    elif isinstance(value, nn.Module):
        yield value
    elif depth and isinstance(value, list | tuple | set | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part, depth - 1)


def _shared(made: Construction, config: Config) -> Iterator[Finding]:
    """Two parameters over one memory are one on the CPU and two on the core; one under two names has one rule."""
    first: dict[int, str] = {}
    if any(isinstance(tensor, nn.parameter.UninitializedTensorMixin) for _, tensor in _named(made.model)):
        return
    for name, parameter in sorted(made.model.named_parameters(), key=lambda named: made.order_of(named[0])):
        place = parameter.untyped_storage()._cdata
        other = first.setdefault(place, name)
        if other != name:
            found = f"two parameters over the memory of {other}"
            fix = f"assign the parameter itself, not its .data: {name} = {other}"
            yield Finding("shared", name, made.line_of(name), found, "one parameter, or two memories", fix)
    rules: dict[int, tuple[str, str]] = {}
    for name, parameter in made.model.named_parameters(remove_duplicate=False):
        rule = kind_of(name, config.optimizer)
        other, known = rules.setdefault(id(parameter), (name, rule))
        if known != rule:
            found = f"trained by the rule for {known!r} as {other}, and for {rule!r} as {name}"
            fix = "rename one, or change optimizer.day_pattern or optimizer.bias_pattern"
            yield Finding("shared", name, made.line_of(name), found, "one rule for one parameter", fix)


def _exceptions(made: Construction, config: Config) -> Iterator[Finding]:
    names = [name for name, tensor in _named(made.model) if tensor.is_floating_point()]
    for pattern in config.model.keep_float32:
        if not any(kept_exception(name, replace(config.model, keep_float32=(pattern,))) for name in names):
            found = f"{pattern!r}, which finds none of {len(names)} parameters and buffers"
            fix = f"correct it, or leave it away; the first are called {', '.join(names[:3])}"
            yield Finding("exception", "model.keep_float32", "config: model.keep_float32", found, "a name", fix)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _kind(thing: Tensor | nn.Module) -> str:
    if isinstance(thing, nn.Module):
        return "modules"
    return "parameters" if isinstance(thing, nn.Parameter) else "tensors"


def _at(line: str) -> str:
    return f", {line}" if line else ""
