"""Watches a step while it is traced: sees every operation, keeps the step going past what would stop it.

In: the tracing of a step. Out: findings in a `Collected`, by the rules of `promotions.py`, `step_rules.py` and
`escapes.py`, and by what `surroundings.py` sees of Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from xla_b2t.audit.escapes import Escape, brought_over, escape, foreign, unexpected
from xla_b2t.audit.findings import Collected, Finding
from xla_b2t.audit.lines import line_here
from xla_b2t.audit.operation import Operation, described
from xla_b2t.audit.promotions import Promotions
from xla_b2t.audit.step_rules import StepRules
from xla_b2t.audit.surroundings import Surroundings
from xla_b2t.xla.trace import identity

LARGEST_STEP = 25_000
"""Operations of one step that is still traced to its end. The three networks of 687 M parameters have 1,400; a loop
over time that Python unrolls has as many a time step as a cell, and compiles for many minutes."""


class TooLarge(Exception):
    """A step has more operations than any that a compiler ends with; `line` is where it was when that was seen."""

    def __init__(self, line: str):
        super().__init__(line)
        self.line = line


class Watch(TorchDispatchMode):
    """The operations of one step, forward and backward.

    Args:
        model: the decoder, on placeholders.
        promotions, rules: what is asked of each operation.
        collected: takes the findings; counts the operations on the core.

    Attributes:
        went_on: whether a value was made up for the step to go on with; what fails later may be for that alone.
        failed_at: line of the operation that raised last.
        call: number of the torch function that is being called; 0 outside of any.
        note: told the line of every operation before it is traced, and all findings when there are new ones.
    """

    def __init__(self, model: nn.Module, promotions: Promotions, rules: StepRules, collected: Collected):
        super().__init__()
        self.went_on = False
        self.failed_at = ""
        self.call = 0
        self.note: Callable[[str, list[Finding] | None], None] | None = None
        self._num_noted = 0
        self._model = model
        self._promotions = promotions
        self._rules = rules
        self._collected = collected
        self._surroundings = Surroundings(model, promotions, collected)
        self._state: dict[int, str] = {}
        self._lines: dict[int, str] = {}
        self._count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is open, the step is watched; the model's state is on placeholders by then."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        self._state = {identity(tensor): name for name, tensor in named}
        self._lines = {}
        self._count = 0
        with ExitStack() as stack:
            stack.enter_context(self._surroundings.watching())
            stack.enter_context(_Calls(self))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((*args, *kwargs.values()))
        device = kwargs.get("device")
        is_on_core = any(tensor.device.type == "xla" for tensor in tensors)
        is_on_core = is_on_core or (device is not None and torch.device(device).type == "xla")
        # Tensors of another class are those of a tracer within the step (torch_xla's scan has one).
        if not is_on_core or not all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        self._collected.now += 1
        self._count += 1
        node = torch._C._current_autograd_node()
        line = self._line(node)
        if self.note:
            count = self._collected.count
            self.note(line, self._collected.list() if count > self._num_noted else None)
            self._num_noted = count
        if self._count > LARGEST_STEP:
            raise TooLarge(line)
        if torch.Tag.nondeterministic_seeded in func.tags and not self._model.training:
            self._report_chance(func, line)
        foreigners = foreign(func, tensors)
        if foreigners:
            self._report_foreigner(foreigners[0], func, line)
            (args, kwargs), here = brought_over(foreigners, (args, kwargs))
            tensors = _tensors((*args, *kwargs.values()))
            for tensor in here:
                self._promotions.explain(tensor, line)
            if func is torch.ops.aten._to_copy.default and not kwargs.get("dtype"):
                return args[0]
        found = escape(func, args, kwargs)
        if found:
            return self._escaped(found, func, line)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "Unexpected execution" not in str(error):
                self.failed_at = line
                raise
            return self._escaped(unexpected(func, args, kwargs), func, line)
        self._look(func, args, tensors, result, line, node is not None)
        return result

    def _line(self, node: torch.autograd.graph.Node | None) -> str:
        """The line of the operation at hand; of one in the backward pass, that of the forward operation."""
        if node is not None:
            return self._lines.get(node._sequence_nr()) or line_here()
        line = line_here()
        # Autograd made the node of this operation, if it has one, right before it asked for the operation.
        self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        return line

    def _look(self, func: Any, args: Any, inputs: list[Tensor], result: Any, line: str, is_gradient: bool) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name == "_propagate_xla_data":
            changed = self._state.get(identity(args[0])) or self._state.get(identity(args[1]))
            if changed and self._surroundings.module:
                self._surroundings.changed(changed, line)
            return
        outputs = _tensors((result,))
        module = "" if is_gradient else self._surroundings.module
        if name.startswith(("native_batch_norm", "_native_batch_norm_legit")) and args[3] is not None and args[5]:
            self._surroundings.changed(self._state.get(identity(args[3]), "running_mean"), line)
        self._apply(Operation(name, args, inputs, outputs, line, module, is_gradient, self.call, self._collected.now))

    def saw_einsum(self, args: tuple[Any, ...], result: Tensor) -> None:
        """One einsum, forward."""
        self._collected.now += 1
        inputs = _tensors(args)
        module, now = self._surroundings.module, self._collected.now
        self._apply(Operation("einsum", args, inputs, [result], line_here(), module, False, 0, now))

    def _apply(self, operation: Operation) -> None:
        self._rules.saw(operation)
        self._promotions.saw(operation)

    def _escaped(self, found: Escape, func: Any, line: str) -> Any:
        self.went_on = True
        name = func._schema.name.removeprefix("aten::").strip("_").replace("local_scalar_dense", "item")
        name = ": ".join(part for part in (self._surroundings.module, name) if part)
        self._collected.add(found.kind, name, line, found.found, found.expected, f"{found.fix}, {line}")
        return found.value

    def _report_chance(self, func: Any, line: str) -> None:
        name = func._schema.name.removeprefix("aten::").strip("_")
        fix = f"draw only where self.training (F.dropout takes training=self.training), {line}"
        found = f"{name} draws random numbers in evaluation"
        name = ": ".join(part for part in (self._surroundings.module, name) if part)
        self._collected.add("chance", name, line, found, "an evaluation that gives the same again", fix)

    def _report_foreigner(self, tensor: Tensor, func: Any, line: str) -> None:
        if self.went_on:
            return  # it may be what was made up
        name = func._schema.name.removeprefix("aten::")
        if tensor.device.type == "meta":
            self._collected.add(
                "unregistered",
                name,
                line,
                f"a tensor {described(tensor)} that is no parameter or buffer of the model",
                "all that a model keeps to be registered",
                f"use self.register_buffer or nn.Parameter, {line}",
            )
        else:
            self._collected.add(
                "device",
                name,
                line,
                f"a tensor {described(tensor)} of the host beside one of the core",
                "tensors of the core: this one would be uploaded at every step",
                f"make it with device=x.device, {line}",
            )


class _Calls(TorchFunctionMode):
    """Numbers the calls of torch functions, and sees einsum, which torch_xla takes before the dispatcher's modes do."""

    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count += 1
        self._watch.call = self._count
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._watch.call = 0
        if func is torch.functional.einsum and result.device.type == "xla":
            self._watch.saw_einsum(args, result)
        return result


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them, as operations take and give them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
