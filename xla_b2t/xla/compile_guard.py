"""Counts compiles and host fallbacks, and stops a run at the first that should not be.

Every graph has a key, for training `("train", bucket)`. The first time a key is seen it may compile; after that a
compile means that something in the step depends on data, and a host fallback that an operation left the core.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch_xla.debug import metrics

from xla_b2t.errors import UserError

# Reading a finished value is not a fallback: it neither cuts a graph nor computes on the host.
_READS = frozenset({"aten::_local_scalar_dense"})


class CompileGuard:
    """Watches one rank. Counters are the process's, so ranks that are threads share them.

    Attributes:
        compiles: graphs compiled inside `watch`.
        compiles_after_warmup: those of them that came under a key seen before.
        compile_seconds: wall time of the calls that compiled.
    """

    def __init__(self, allow_recompile: bool = False):
        self.compiles = 0
        self.compiles_after_warmup = 0
        self.compile_seconds = 0.0
        self._allow = allow_recompile
        self._shapes: dict[tuple[str, int], str] = {}
        self._fallbacks_at_start = self._fallback_counts()

    @contextmanager
    def watch(self, phase: str, bucket: int, shape: str) -> Iterator[None]:
        """Surrounds the tracing and the `sync` of one graph.

        Args:
            phase: "train", "apply", "evaluate".
            bucket: index of the bucket; -1 where the graph has none.
            shape: the shape of its inputs in words, for the error.

        Raises:
            UserError: it compiled although this graph was compiled before, or an operation ran on the host.
        """
        before = _num_compiles()
        start = time.monotonic()
        yield
        new = _num_compiles() - before
        known = self.knows(phase, bucket)
        if new:
            self.compiles += new
            self.compile_seconds += time.monotonic() - start
        if new and known:
            self.compiles_after_warmup += new
            if not self._allow:
                raise UserError(
                    f"the {phase} step was compiled again for {shape}; compiled before: "
                    + "; ".join(f"{p} {s}" for (p, _), s in self._shapes.items()),
                    f"{phase} step, bucket {bucket}",
                    "make the model's shapes and Python branches independent of data, or pass --allow-recompile",
                )
        if not known:
            self._shapes[phase, bucket] = shape
            self._refuse_fallbacks(phase, shape)

    def knows(self, phase: str, bucket: int) -> bool:
        """Whether this graph was traced before, so that tracing it again must not compile."""
        return (phase, bucket) in self._shapes

    @property
    def host_fallbacks(self) -> int:
        """Operations that ran on the host since this guard was made."""
        return sum(self._new_fallbacks().values())

    def check_fallbacks(self) -> None:
        """Raises a UserError if an operation ran on the host since this guard was made."""
        self._refuse_fallbacks("train", "every bucket")

    def _refuse_fallbacks(self, phase: str, shape: str) -> None:
        found = self._new_fallbacks()
        if found and not self._allow:
            names = ", ".join(f"{name} ({count} times)" for name, count in found.items())
            raise UserError(
                f"operations ran on the host instead of the core: {names}",
                f"{phase} step, {shape}",
                "replace them in the model by operations that torch_xla lowers, or pass --allow-recompile",
            )

    def _new_fallbacks(self) -> dict[str, int]:
        start = self._fallbacks_at_start
        now = self._fallback_counts()
        return {name: count - start.get(name, 0) for name, count in now.items() if count > start.get(name, 0)}

    @staticmethod
    def _fallback_counts() -> dict[str, int]:
        names = (name for name in metrics.counter_names() if name.startswith("aten::") and name not in _READS)
        return {name: metrics.counter_value(name) for name in names}


def _num_compiles() -> int:
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0
