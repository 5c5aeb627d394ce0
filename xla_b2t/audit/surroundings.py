"""What only Python shows of a step that is being traced: what its operations are called from, and around.

In: the model, while a step runs it. Out: findings: autocast, values printed, recurrences handed another dtype, random
numbers drawn on the host, parameters made in forward, scores that leave the model in another dtype.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from xla_b2t.audit.findings import Collected
from xla_b2t.audit.lines import is_users, line_here, line_of_function, line_that_prints
from xla_b2t.audit.operation import described, dtype_name
from xla_b2t.audit.promotions import Promotions
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput
from xla_b2t.xla import scan
from xla_b2t.xla.frames import shown
from xla_b2t.xla.trace import identity


class Surroundings:
    """Hooks around one model.

    Args:
        model: the decoder, on placeholders.
        promotions: told what a loop is handed, and asked where what a model returns became wide.
        collected: takes the findings.
    """

    def __init__(self, model: nn.Module, promotions: Promotions, collected: Collected):
        self._model = model
        self._promotions = promotions
        self._collected = collected
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []
        self._randomness: tuple[Any, ...] = ()

    @property
    def module(self) -> str:
        """Qualified name of the module that is running; "" outside of the model."""
        return self._inside[-1] if self._inside else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is open, the model is watched."""
        self._randomness = _host_randomness()
        with ExitStack() as stack:
            stack.enter_context(self._autocast())
            stack.enter_context(self._printing())
            stack.enter_context(self._loops())
            for handle in (
                hooks.register_module_parameter_registration_hook(self._replaced),
                hooks.register_module_buffer_registration_hook(self._replaced),
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
                self._model.register_forward_hook(self._after_forward, with_kwargs=True),
            ):
                stack.callback(handle.remove)
            yield

    def changed(self, name: str, line: str) -> None:
        """Reports that a forward pass changes a parameter or buffer."""
        title = ": ".join(part for part in (self.module, name) if part)
        fix = "make it a parameter, or compute it before training"
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            fix = "use LayerNorm or GroupNorm in place of BatchNorm, or track_running_stats=False"
        expected = "a state that stays: every rank would hold its own version"
        self._collected.add("buffer", title, line, f"a training step changes {name}", expected, fix)

    def _autocast(self) -> Any:
        enter = torch.autocast.__enter__

        def watched(context: Any) -> Any:
            if not context._enabled:
                return enter(context)
            line = line_here()
            fix = f"take the `with torch.autocast` away: the trainer keeps the model in one dtype, {line}"
            self._collected.add("autocast", "autocast", line, "a part under autocast", "none", fix)
            return enter(context)

        return mock.patch.object(torch.autocast, "__enter__", watched)

    def _printing(self) -> Any:
        show = torch._tensor_str._str

        def watched(tensor: Tensor, *rest: Any, **options: Any) -> str:
            if identity(tensor) < 0:
                return show(tensor, *rest, **options)
            if line := line_that_prints():
                found, fix = f"{described(tensor)} is turned into text", f"take it out of the step, {line}"
                self._collected.add("host-read", "print", line, found, "no read: the core stops for it", fix)
            return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype})"

        return mock.patch.object(torch._tensor_str, "_str", watched)

    def _loops(self) -> Any:
        lower_step = scan._lower_step

        def watched(step: Any, carry: Any, *rest: Any) -> Any:
            line = line_here()

            @functools.wraps(step)
            def watched_step(carry: Any, x: Any, constants: Any) -> Any:
                self._promotions.enter_loop(carry, line)
                return step(carry, x, constants)

            return lower_step(watched_step, carry, *rest)

        return mock.patch.object(scan, "_lower_step", watched)

    def _replaced(self, module: nn.Module, name: str, value: Any) -> None:
        """A parameter or buffer is assigned anew in forward: what the trainer holds is not what the model uses."""
        if not self._inside or value is None:
            return
        if isinstance(value, nn.Parameter):
            self._collected.add(
                "optimizer",
                name,
                line_here(),
                "a new parameter in forward, unknown to the optimizer",
                "the parameter that the optimizer was given",
                "make it in the constructor",
            )
        else:
            self.changed(name, line_here())

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        weights = getattr(module, "weight_hh_l0", None)
        for tensor in tree_leaves(args) if isinstance(weights, Tensor) else ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != weights.dtype:
                line = line_here()
                found = f"{described(tensor)} meets a recurrence in {dtype_name(weights.dtype)}"
                self._collected.add(
                    "carry",
                    type(module).__name__,
                    line,
                    found,
                    "one dtype",
                    f"bring sequence and first state to the dtype of the weights: .to(x.dtype), {line}",
                )
        self._inside.append(self._names.get(id(module), type(module).__name__) or type(module).__name__)

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self._check_randomness(model, args, kwargs)
        if not isinstance(output, DecoderOutput):
            return output
        dtype, end = args[0].dtype, line_of_function(model.forward)

        def narrowed(logits_BPK: Any, what: str) -> Any:
            if not isinstance(logits_BPK, Tensor) or logits_BPK.dtype not in (torch.float32, torch.float64):
                return logits_BPK
            if logits_BPK.dtype != dtype:
                self._promotions.left_wide(logits_BPK, what, end)
            return logits_BPK.to(dtype)

        heads = output.heads
        if isinstance(heads, tuple):
            heads = tuple(
                head._replace(logits_BPK=narrowed(head.logits_BPK, f"logits of {head.name!r}"))
                if isinstance(head, AuxiliaryHead)
                else head
                for head in heads
            )
        return output._replace(logits_BPK=narrowed(output.logits_BPK, "logits"), heads=heads)

    def _check_randomness(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Random numbers of the host: another graph, or another constant, at every step and on every rank."""
        if _host_randomness() == self._randomness:
            return
        line = _line_that_draws(lambda: model.forward(*args, **kwargs))
        self._randomness = _host_randomness()
        if not line:
            return  # something of torch's own
        self._collected.add(
            "host-random",
            "forward",
            line,
            "random numbers drawn on the host",
            "random numbers of the core: these are other ones on every rank, and after a resume",
            "draw with torch.rand(..., device=x.device), in a fixed shape",
        )


def _host_randomness() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2], torch.get_rng_state().numpy().tobytes()


def _line_that_draws(forward: Callable[[], Any]) -> str:
    """Runs the forward pass again, line by line, to find the first that changes the host's random numbers."""
    # From another state, or a forward pass that sets a seed would be seen to change nothing.
    torch.manual_seed(0x5EED)
    state, last, found = _host_randomness(), "", ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal state, last, found
        if not is_users(frame.f_code.co_filename):
            return trace if event == "call" else None
        if not found and last and _host_randomness() != state:
            found = last
        if event == "line":
            last = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        forward()
    finally:
        sys.settrace(before)
    return found or (last if _host_randomness() != state else "")
