"""Rules of the second look that ask nothing of where a value comes from but its last operation.

In: the operations of a traced step. Out: findings.

- `late-cast`: a sum over many values in bfloat16 is cast to float32 when the digits are lost.
- `reduction`: log-softmax and running sums in bfloat16.
- `float64`, `float16`: nowhere. A Python float compared with a tensor is compared in float64.
- `days`: a table with fewer rows than there are days; XLA takes the last row without a word.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xla_b2t.audit.findings import Collected
from xla_b2t.audit.operation import SAME_VALUE, Operation, described, dtype_name
from xla_b2t.audit.promotions import Promotions
from xla_b2t.xla.trace import identity

_SUMS = frozenset(["sum", "mean", "prod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean"])
_RUNNING = frozenset(["_log_softmax", "logsumexp", "cumsum", "cumprod", "logcumsumexp"])
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
_LOOKUPS = {"index_select": (0, 2), "embedding": (0, 1), "gather": (0, 2)}
"""Operation -> places of the table and of the row numbers among its arguments."""


@dataclass(frozen=True)
class _Sum:
    """A reduction in bfloat16."""

    name: str
    count: int
    line: str
    module: str
    at: int


class StepRules:
    """The rules, over the operations of one traced step.

    Args:
        narrow: what the model computes in.
        collected: takes the findings.
        num_days: D of the data.
        promotions: told which values are explained by a finding here.
    """

    def __init__(self, narrow: torch.dtype, collected: Collected, num_days: int, promotions: Promotions):
        self._narrow = narrow
        self._collected = collected
        self._num_days = num_days
        self._promotions = promotions
        self._sums: dict[int, _Sum] = {}
        self._days: set[int] = set()

    def begin(self, days_B: Tensor) -> None:
        """Before a step: which of its inputs holds the days."""
        self._sums, self._days = {}, {identity(days_B)}

    def saw(self, operation: Operation) -> None:
        """Applies the rules to one operation; before `Promotions`, which is told what is explained."""
        self._forbid(operation)
        self._check_days(operation)
        if self._narrow == torch.float32 or operation.is_gradient or not operation.inputs:
            return
        if operation.name in _RUNNING and operation.outputs[0].dtype == self._narrow:
            self._report_running(operation)
        if operation.name == "_to_copy" and operation.outputs[0].dtype == torch.float32:
            self._check_late(operation)
        self._follow_sums(operation)

    def _report_running(self, operation: Operation) -> None:
        name = operation.name.strip("_")
        fix = f"compute it in float32: x.float() before it and .to(x.dtype) after, {operation.line}"
        if name == "log_softmax":
            fix = "return the scores before log_softmax (the loss takes it, in float32), or " + fix
        found = f"{name} over {described(operation.inputs[0])}"
        self._collected.add("reduction", operation.title, operation.line, found, "float32", fix, operation.at)

    def _follow_sums(self, operation: Operation) -> None:
        """Remembers which values are sums in bfloat16."""
        first, results = operation.inputs[0], [x for x in operation.outputs if x.dtype == self._narrow]
        if operation.name in _SUMS and first.dtype == self._narrow and results:
            count = first.numel() // max(1, results[0].numel())
            known = _Sum(operation.name, count, operation.line, operation.module, operation.at)
        elif operation.name in SAME_VALUE and len(operation.inputs) == 1:
            known = self._sums.get(identity(first))
        else:
            return
        for tensor in results if known and known.count > 1 else ():
            self._sums[identity(tensor)] = known

    def _check_late(self, operation: Operation) -> None:
        known = self._sums.get(identity(operation.inputs[0]))
        if not known:
            return
        found = f"{known.name} over {known.count:,} values in {dtype_name(self._narrow)}, cast at {operation.line}"
        fix = f"sum in float32: {known.name}(dtype=torch.float32) or .float() before it, {known.line}"
        name = ": ".join(part for part in (known.module, known.name) if part)
        self._collected.add("late-cast", name, known.line, found, "a cast before the sum", fix, known.at)

    def _forbid(self, operation: Operation) -> None:
        found = ""
        fix = f"make it in float32 or in the dtype of the features, {operation.line}"
        numbers = [value for value in operation.args if type(value) is float]
        floats = [tensor for tensor in operation.inputs if tensor.dtype != torch.float64 and tensor.dim()]
        if operation.name in _COMPARISONS and numbers and floats:
            found = f"{described(floats[0])} compared with {numbers[0]}, which XLA does in float64"
            fix = "compare with a tensor: x < torch.full((), 0.5, dtype=x.dtype, device=x.device)"
            self._collected.add("float64", operation.title, operation.line, found, "no float64", fix, operation.at)
        for dtype in (torch.float64, torch.float16):
            new = [x for x in operation.outputs if x.dtype == dtype and (x.dim() or dtype == torch.float16)]
            if not new:
                continue
            lines = [self._promotions.origin_line(x) for x in operation.inputs if x.dtype == dtype]
            known = [line for line in lines if line is not None]
            for tensor in new:
                self._promotions.explain(tensor, known[0] if known else operation.line)
            if known or (operation.is_gradient and self._collected.kinds() & {dtype_name(dtype)}):
                continue
            found = described(new[0])
            self._collected.add(
                dtype_name(dtype), operation.title, operation.line, found, f"no {dtype_name(dtype)}", fix, operation.at
            )

    def _check_days(self, operation: Operation) -> None:
        if operation.name in (*SAME_VALUE, "_to_copy") and len(operation.inputs) == 1:
            if identity(operation.inputs[0]) in self._days:
                self._days.update(map(identity, operation.outputs))
            return
        if operation.name not in _LOOKUPS:
            return
        table, rows = (operation.args[place] for place in _LOOKUPS[operation.name])
        axis = operation.args[1] if operation.name != "embedding" else 0
        if identity(rows) in self._days and table.shape[axis] < self._num_days:
            found = f"a table of {table.shape[axis]} rows for {self._num_days} days"
            fix = "make the model for Sizes.num_days days: beyond its end XLA takes the last row without a word"
            expected = f"{self._num_days} rows"
            self._collected.add("days", operation.title, operation.line, found, expected, fix, operation.at)
