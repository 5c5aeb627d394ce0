"""What leaves the core in the middle of a step, and what to go on with in its place.

In: an operation that a traced step is about to do. Out: an `Escape`, with a value of the shape and dtype that the
operation would give, so that the rest of the step is looked at too. Nothing is read: there is nothing to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from xla_b2t.audit.operation import described
from xla_b2t.xla.trace import placeholders

_READ = "host-read"
_FIX_READ = "keep it on the core: a mask and torch.where in place of a branch or a loop over lengths, index_select in "
_FIX_READ += "place of indexing by a value; what is fixed is computed in the constructor"


_IN_VAIN = frozenset(["_pack_padded_sequence", "glu_backward"])
"""Made of other operations, one of which is not lowered; it ends the process."""


_TAKES_THE_HOSTS = frozenset(["copy_", "_copy_from", "_to_copy", "index", "index_put", "index_put_", "_unsafe_index"])


@dataclass(frozen=True)
class Escape:
    """One thing that a step must not do, in the words of its finding, and the `value` to go on with."""

    kind: str
    found: str
    expected: str
    fix: str
    value: Any


def escape(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Escape | None:
    """The escape that an operation on the core would be; None for an operation that stays there."""
    name = func._schema.name.removeprefix("aten::")
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if torch.Tag.data_dependent_output in func.tags:
        shape = "a value" if first is None else f"a value of {described(first)}"
        return Escape(_READ, f"{shape} is read by the host", "no read: the core stops for it", _FIX_READ, _one(first))
    if name == "_to_copy" and _is_host(kwargs.get("device")):
        value = torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        found = f"{described(first)} is copied to the host"
        return Escape(_READ, found, "no read: the core stops for it", _FIX_READ, value)
    if name in ("copy_", "_copy_from") and first.device.type == "cpu":
        found = f"{described(args[1])} is copied to the host"
        return Escape(_READ, found, "no read: the core stops for it", _FIX_READ, first)
    if _shape_follows_values(name, func, args):
        found = f"the shape of what {name.strip('_')} gives depends on values"
        fix = "keep the shape and mask: torch.where(mask, x, 0), masked_fill, sums over a mask"
        if name.startswith("index_put"):
            found, value = "values are put in where a mask says, through a list of places", placeholders([first])[0]
        else:
            value = _as_if(func, args, kwargs)
        return Escape("data-shape", found, "shapes that are known before", fix, value)
    if not _is_lowered(func) or name in _IN_VAIN:
        return _fallback(name, _as_if(func, args, kwargs))
    return None


def foreign(func: torch._ops.OpOverload, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with axes that an operation on the core is handed from elsewhere: the host, or no device at all."""
    found = [tensor for tensor in tensors if tensor.device.type != "xla" and tensor.dim() > 0]
    if found and func._schema.name.removeprefix("aten::") in _TAKES_THE_HOSTS:
        return [tensor for tensor in found if tensor.device.type == "meta"]
    return found


def brought_over(foreigners: Sequence[Tensor], values: Any) -> tuple[Any, list[Tensor]]:
    """Arguments with placeholders in the place of what is not on the core; and those placeholders."""
    stand_ins = {id(tensor): placeholders([tensor])[0] for tensor in foreigners}
    return tree_map_only(Tensor, lambda tensor: stand_ins.get(id(tensor), tensor), values), list(stand_ins.values())


def unexpected(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Escape:
    """The escape that an operation turned out to be when it was traced."""
    name = func._schema.name.removeprefix("aten::")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "XLA"):
        return _fallback(name, _as_if(func, args, kwargs))
    found = f"{name} needs values on the host"
    return Escape(_READ, found, "no read: the core stops for it", _FIX_READ, _as_if(func, args, kwargs))


def _fallback(name: str, value: Any) -> Escape:
    found = f"{name} has no lowering for XLA and would run on the host"
    fix = _WAYS_OUT.get(name, "write it with operations that torch_xla lowers")
    return Escape("host-fallback", found, "an operation of the core", fix, value)


def _shape_follows_values(name: str, func: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    if name in ("index", "_unsafe_index", "index_put", "index_put_"):
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


_WAYS_OUT = {
    "logaddexp": "use the maximum, plus the log of the sum of exp of what is left",
    "glu_backward": "split by chunk(2, dim) and multiply by a sigmoid",
    "_weight_norm_interface": "leave weight_norm away",
    "_ctc_loss": "return the scores as an AuxiliaryHead: the trainer has a CTC loss in the graph",
    "_pack_padded_sequence": "give the recurrence the padded sequence, and mask what comes out",
    "_embedding_sparse_backward": "leave sparse=True away",
}


@cache
def _is_lowered(func: torch._ops.OpOverload) -> bool:
    """Whether torch_xla has the operation, or PyTorch makes it of others."""
    if func.namespace != "aten":
        return True
    keys = ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def _as_if(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result as placeholders, where every value of every operand is 1."""
    host_args, host_kwargs = tree_map_only(Tensor, lambda x: torch.ones(x.shape, dtype=x.dtype), (tuple(args), kwargs))
    host_kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in host_kwargs.items()}
    return tree_map_only(Tensor, lambda tensor: placeholders([tensor])[0], func(*host_args, **host_kwargs))


def _one(tensor: Tensor | None) -> Any:
    if tensor is None or tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"
