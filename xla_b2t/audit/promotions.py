"""The second look's rules: which operation of a step leaves bfloat16, where that starts, and with what.

In: the operations of a traced step, one by one, with the line of Python each comes from. Out: findings. The policy is
`models/policy.py`; docs/decisions/0007-what-is-a-promotion.md says why the rules are these:

- `promotion`: an operation is handed bfloat16 and something wider, and gives the wider. The wider operand was made so
  (`torch.eye`, `torch.zeros`, `torch.randn` without a dtype) or was handed in.
- `cast`: the wider operand comes from an explicit cast. A cast is the author's right as long as its value comes back to
  bfloat16 by itself: it must not meet bfloat16, and it must not enter a matmul or a convolution.

A wide operand that was told already, and whatever comes of it, is counted with it and not told again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xla_b2t.audit.findings import Collected
from xla_b2t.audit.operation import Operation, described, dtype_name
from xla_b2t.xla.trace import identity

_WIDE = (torch.float32, torch.float64)
_MATMULS = frozenset(
    ["mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "convolution_overrideable",
     "einsum"]
)  # fmt: skip
# Take operands of two dtypes by their nature, and give the first one's.
_MAY_MIX = frozenset(
    ["copy", "copy_", "_to_copy", "native_batch_norm", "native_batch_norm_backward", "native_layer_norm_backward",
     "native_group_norm_backward", "index_put", "scatter", "slice_scatter"]
)  # fmt: skip


@dataclass(frozen=True)
class _Origin:
    """Where a wide value became wide: `how` is "made", "cast", "kept" (an exception) or "mixed"; `call` the call that
    did it."""

    how: str
    what: str
    line: str
    at: int
    call: int = 0


class Promotions:
    """The rules, over the operations of one traced step.

    Args:
        narrow: what the model computes in.
        collected: takes the findings.
    """

    def __init__(self, narrow: torch.dtype, collected: Collected):
        self._narrow = narrow
        self._collected = collected
        self._origins: dict[int, _Origin] = {}
        self._disguised: set[int] = set()

    def begin(self, kept: dict[str, Tensor], scheduled: Sequence[Tensor]) -> None:
        """Before a step: what of its inputs is wide by the policy."""
        self._origins = {identity(tensor): _Origin("kept", name, "", 0) for name, tensor in kept.items()}
        self._origins |= {identity(tensor): _Origin("made", "`scheduled`", "", 0) for tensor in scheduled}
        self._disguised = set()

    def saw(self, operation: Operation) -> None:
        """Applies the rules to one operation."""
        if self._narrow == torch.float32:
            return
        wide = [tensor for tensor in operation.outputs if tensor.dtype in _WIDE]
        # Of some operations torch_xla says that mixed operands give the narrow dtype; its programs give the wide one.
        dtypes = {tensor.dtype for tensor in operation.inputs if tensor.dim()}
        mixes = self._narrow in dtypes and not dtypes.isdisjoint(_WIDE) and operation.name not in _MAY_MIX
        disguised = [self._origins[identity(x)] for x in operation.inputs if identity(x) in self._disguised]
        if disguised and operation.name != "_to_copy":
            self._collected.follows(disguised[0].line, operation.line)
            for tensor in operation.outputs:
                self._hide(tensor, disguised[0])
        elif wide or mixes:
            origin = self._origin(operation)
            for tensor in operation.outputs if origin else ():
                self._hide(tensor, origin)

    def left_wide(self, tensor: Tensor, what: str, line: str) -> None:
        """Blames what a model returned in a wider dtype on where it became wide."""
        origin = self._origins.get(identity(tensor))
        if origin and origin.line:
            self._blame(origin, None, f"{what} leave the model in {dtype_name(tensor.dtype)}, at {line}", line)
        else:
            self._add(
                "promotion", what, line, 0, dtype_name(tensor.dtype), f"bring {what} to the dtype of the features"
            )

    def enter_loop(self, carry: Sequence[Tensor], line: str) -> None:
        """The placeholders of a loop's carry, which is handed to `scan` at `line`."""
        for tensor in carry:
            if tensor.dtype in _WIDE:
                self._origins[identity(tensor)] = _Origin("carry", "the carry of a scan", line, 0)

    def origin_line(self, tensor: Tensor) -> str | None:
        """Where that lies which made a tensor what it is; None where nothing is known of it."""
        origin = self._origins.get(identity(tensor))
        return origin.line if origin else None

    def explain(self, tensor: Tensor, line: str) -> None:
        """What comes of this tensor follows from what was found at `line`."""
        self._origins[identity(tensor)] = _Origin("mixed", "", line, 0)

    def _hide(self, tensor: Tensor, origin: _Origin) -> None:
        self._origins.setdefault(identity(tensor), origin)
        if tensor.dtype == self._narrow and origin.how == "mixed":
            self._disguised.add(identity(tensor))

    def _is_told(self, origin: _Origin) -> bool:
        return bool(origin.line and self._collected.cause(origin.line))

    def _origin(self, operation: Operation) -> _Origin | None:
        """Where the wide result of an operation became wide; reports it when that is here."""
        narrow = [tensor for tensor in operation.inputs if tensor.dtype == self._narrow]
        wide = [tensor for tensor in operation.inputs if tensor.dtype in _WIDE]
        origins = [origin for tensor in wide if (origin := self._origins.get(identity(tensor)))]
        if not wide:
            return self._beginning(operation, bool(narrow))
        if operation.is_gradient and self._collected.cause(operation.line):
            self._collected.follows(operation.line, operation.line)
            return _Origin("mixed", operation.name, operation.line, operation.at)
        # What was reported explains the rest; then a cast, which is where the author can mend it.
        origins.sort(key=lambda origin: (not self._is_told(origin), origin.how != "cast"))
        if narrow and any(tensor.dim() for tensor in narrow):
            return self._mixed(operation, narrow[0], wide[0], origins[0] if origins else None)
        if operation.name in _MATMULS and not any(origin.how == "kept" for origin in origins):
            how = f"enters {operation.name} at {operation.line}, which then runs in {dtype_name(wide[0].dtype)}"
            for origin in origins:
                if self._is_told(origin) or origin.how == "cast":
                    self._blame(origin, operation, how, operation.line)
        return origins[0] if origins else None

    def _beginning(self, operation: Operation, is_narrow: bool) -> _Origin:
        """The origin of a value that no wide operand made wide."""
        tensor = next(tensor for tensor in operation.outputs if tensor.dtype in _WIDE)
        is_cast = operation.name == "_to_copy" and all(x.device.type == "xla" for x in operation.inputs)
        if operation.inputs and (is_cast or is_narrow):
            before = next((dtype_name(x.dtype) for x in operation.inputs if x.dtype != tensor.dtype), "")
            shape = described(tensor).partition(" ")[2]
            return _Origin("cast", f"{before} {shape}", operation.line, operation.at, operation.call)
        return _Origin("made", _maker(operation.name), operation.line, operation.at)

    def _mixed(self, operation: Operation, narrow: Tensor, wide: Tensor, origin: _Origin | None) -> _Origin:
        if origin and origin.call and origin.call == operation.call:
            return origin  # within one function of torch, such as rms_norm: what comes out of it counts
        together = f"{described(narrow)} and {described(wide)}"
        if origin and (origin.how == "cast" or self._is_told(origin)):
            how = f"meets {described(narrow)} in {operation.name} at {operation.line}"
            self._blame(origin, operation, how, operation.line)
            return origin
        if origin and origin.how == "carry":
            fix = f"begin the loop in the dtype of its sequence, {origin.line}; or cast at {operation.line}, both ways"
            found = f"a carry in float32 meets {described(narrow)} at {operation.line}"
            self._add("carry", operation.title, origin.line, operation.at, found, fix, "one dtype")
            return _Origin("mixed", operation.name, origin.line, operation.at)
        carried = self._collected.first("carry")
        if carried and (not origin or operation.line == carried):
            # What happens in a recurrence of torch_xla's is not seen; its state was wide from the start.
            self._collected.follows(carried, operation.line)
            return _Origin("mixed", operation.name, carried, operation.at)
        made = origin.what if origin else "something handed in"
        place = origin.line if origin and origin.line else ""
        by = f", {made}" + (f" at {place}" if place else "")
        fix = f"bring it to the dtype of what it meets: dtype=x.dtype where it is made, or .to(x.dtype){_at(place)}"
        if origin and origin.how == "kept":
            fix = f"cast what meets {made} with .float(), and the result back; or take it out of model.keep_float32"
        name = operation.title
        self._add(
            "promotion", name, operation.line, operation.at, f"{together}{by}, give {dtype_name(wide.dtype)}", fix
        )
        return _Origin("mixed", operation.name, operation.line, operation.at)

    def _blame(self, origin: _Origin, operation: Operation | None, how: str, line: str) -> None:
        """Reports what starts at the line of an origin, or counts it there."""
        if self._is_told(origin):
            self._collected.follows(origin.line, line)
            return
        if origin.how != "cast":
            fix = f"make it with the dtype of the features{_at(origin.line)}"
            self._add("promotion", origin.what, origin.line, origin.at, f"float32, {origin.what}, which {how}", fix)
            return
        fix = f"leave the cast away, or end it with .to(x.dtype) before {line}"
        if origin.line == line and operation and origin.call and origin.call == operation.call:
            fix = f"the cast is within a function of PyTorch: write that out in the dtype of the features, {line}"
        name = operation.title if operation else "output"
        self._add("cast", name, origin.line, origin.at, f"{origin.what} cast to float32, which {how}", fix)

    def _add(self, kind: str, name: str, line: str, at: int, found: str, fix: str, expected: str = "") -> None:
        expected = expected or f"{dtype_name(self._narrow)} throughout"
        self._collected.add(kind, name, line, found, expected, fix, at)


def _maker(name: str) -> str:
    return "a number" if name == "scalar_tensor" else f"made by {name.strip('_')}"


def _at(line: str) -> str:
    return f", {line}" if line else ""
