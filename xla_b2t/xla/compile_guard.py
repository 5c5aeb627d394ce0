"""Counts compiles and what leaves the core, and stops a run at the first of either that should not be.

Every graph has a key, for training `("train", bucket)`. The first time a key is seen it compiles once; a second compile
then means that something cuts the step in two, and a compile later that something in it depends on data. An operation
that runs on the host, or a value that is read there, stalls the core at every step and is refused at any time.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch.overrides import TorchFunctionMode
from torch_xla.debug import metrics

from xla_b2t.errors import UserError

_NOT_THE_USERS = tuple(str(Path(module.__file__).parent) for module in (torch, torch_xla))


class CompileGuard:
    """Watches one rank.

    torch_xla counts by process, and ranks can be threads of one. So what a rank compiles is told by its keys: one graph
    for each new key, which such ranks compile once for all of them. The counters only tell what came on top; a compile
    is overlooked while another rank of the process is at a new key, because it may be that rank's.

    Attributes:
        compiles: graphs that were new to this rank, and every compile beyond those.
        compiles_after_warmup: those of them that came under a key seen before.
        compile_seconds: wall time of the calls that compiled.
        host_fallbacks: operations inside `watch` that ran on the host, and values read there.
    """

    def __init__(self, allow_recompile: bool = False):
        self.compiles = 0
        self.compiles_after_warmup = 0
        self.compile_seconds = 0.0
        self.host_fallbacks = 0
        self._allow = allow_recompile
        self._shapes: dict[tuple[str, int], str] = {}

    @contextmanager
    def watch(self, phase: str, bucket: int, shape: str) -> Iterator[None]:
        """Surrounds the tracing and the `sync` of one graph.

        Args:
            phase: "train", "apply", "evaluate".
            bucket: index of the bucket; -1 where the graph has none.
            shape: the shape of its inputs in words, for the error.

        Raises:
            UserError: an operation ran on the host or a value was read there, with the line that did it when the key
                is new; it was cut into several graphs; or it compiled although it was compiled before.
        """
        known = self.knows(phase, bucket)
        start = time.monotonic()
        blame = _Blame()
        with _MAY_COMPILE.observed(new=not known) as others:
            before, left_before = _num_compiles(), _left_the_core()
            if known:
                yield
            else:
                with blame:
                    yield
            compiled = _num_compiles() - before
            left = {
                name: count - left_before.get(name, 0)
                for name, count in _left_the_core().items()
                if count > left_before.get(name, 0)
            }
        if others.seen:
            compiled = 0 if known else 1
        self._count(known, compiled, sum(left.values()), time.monotonic() - start)
        self._shapes.setdefault((phase, bucket), shape)
        if self._allow:
            return
        if left:
            raise _left_error(left, blame.line or f"{phase} step, {shape}")
        if compiled > 1 and not known:
            raise UserError(
                f"the {phase} step was cut into {compiled} graphs: something in it reads the core or ends the graph",
                blame.line or f"{phase} step, {shape}",
                "take .cpu(), torch_xla.sync() and the like out of the model, or pass --allow-recompile",
            )
        if compiled and known:
            raise UserError(
                f"the {phase} step was compiled again for {shape}; compiled before: "
                + "; ".join(f"{p} {s}" for (p, _), s in self._shapes.items()),
                f"{phase} step, bucket {bucket}",
                "make the model's shapes and Python branches independent of data, or pass --allow-recompile",
            )

    def knows(self, phase: str, bucket: int) -> bool:
        """Whether this graph was traced before, so that tracing it again must not compile."""
        return (phase, bucket) in self._shapes

    def forget(self, *phases: str) -> None:
        """Lets the graphs of these phases be new again: their shapes are about to change, and that is meant."""
        self._shapes = {key: shape for key, shape in self._shapes.items() if key[0] not in phases}

    def _count(self, known: bool, compiled: int, left: int, seconds: float) -> None:
        self.host_fallbacks += left
        self.compiles += compiled if known else max(1, compiled)
        if known:
            self.compiles_after_warmup += compiled
        if compiled or not known:
            self.compile_seconds += seconds


@contextmanager
def may_compile() -> Iterator[None]:
    """Surrounds a graph outside a step, which no guard of this process's ranks shall take for its own."""
    with _MAY_COMPILE.observed(new=True):
        yield


class _Observation:
    seen = False
    """Whether another rank may have compiled in the meantime; known when the observation has ended."""


class _Compiling:
    """When the ranks of this process may compile, as the counters cannot tell whose compile they counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._begun = 0

    @contextmanager
    def observed(self, new: bool) -> Iterator[_Observation]:
        """Tells whether another thread was, at some time until this ends, inside one of these with `new`."""
        others = _Observation()
        with self._lock:
            was_open, begun = self._open > 0, self._begun
            self._open += new
            self._begun += new
        try:
            yield others
        finally:
            with self._lock:
                self._open -= new
                others.seen = was_open or self._begun > begun + new


_MAY_COMPILE = _Compiling()  # of the process, as the counters are that it explains


class _Blame(TorchFunctionMode):
    """Finds the first line of Python that called a torch function which left the core or made it compile."""

    line = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = _num_compiles(), _left_the_core()
        result = func(*args, **(kwargs or {}))
        # What happens inside the backward pass is not the fault of the line that started it.
        if not self.line and func is not torch.Tensor.backward and (_num_compiles(), _left_the_core()) != before:
            frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith(_NOT_THE_USERS)]
            self.line = f"{frames[-1].filename}:{frames[-1].lineno}"
        return result


def _left_error(left: dict[str, int], where: str) -> UserError:
    names = ", ".join(f"{name} ({count} times)" for name, count in left.items())
    if "aten::_local_scalar_dense" in left:
        return UserError(
            f"the step reads the core, which must then stop at every step: {names}",
            where,
            "take .item(), float(), bool(), `if` on a tensor and the like out of the model, or pass --allow-recompile",
        )
    return UserError(
        f"operations ran on the host instead of the core: {names}",
        where,
        "replace them in the model by operations that torch_xla lowers, or pass --allow-recompile",
    )


def _left_the_core() -> dict[str, int]:
    """Counts of the operations without a lowering and of values read; 5 microseconds."""
    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}


def _num_compiles() -> int:
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0
