"""A step as a program, without data, memory or a TPU: traced on placeholders and lowered, never run.

In: tensors that a step changes in place, and the step. Out: an HLO module with the same buffers donated as at run time.
A placeholder has a shape and a dtype and nothing else; a step that reads one back raises here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from xla_b2t.xla.device import to_host
from xla_b2t.xla.wire import field, varint, whole_number
from xla_b2t.xla.world import Graph


@dataclass(frozen=True)
class Traced:
    """A step as a program.

    Attributes:
        program: a serialised HloModuleProto.
        numbers: for each tensor that was asked for the number of the program's parameter that holds it; -1 where the
            program does without. The TPU's compiler keeps the numbers.
    """

    program: bytes
    numbers: tuple[int, ...]


def placeholders(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """XLA tensors with the shapes and dtypes of the given ones, which may be on the `meta` device."""
    return [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in tensors]


def identity(tensor: torch.Tensor) -> int:
    """A number that a value of the core has for itself; a tensor elsewhere has a negative one."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "xla"
    return torch_xla._XLAC._xla_get_tensor_id(tensor) if is_plain else -id(tensor)


@contextmanager
def no_execution() -> Iterator[None]:
    """While it is open, reading an XLA tensor raises instead of running what was traced (and instead of a crash)."""
    torch_xla.device()  # starts the runtime, which the switch below does not do
    torch_xla._XLAC._set_allow_execution(False)
    try:
        yield
    finally:
        torch_xla._XLAC._set_allow_execution(True)


def trace(state: Sequence[torch.Tensor], step: Callable[[], Sequence[torch.Tensor] | None]) -> bytes:
    """Traces one step.

    Args:
        state: placeholders that the step changes in place. They are the first outputs of the program, and their old
            buffers are donated to the new values, as torch_xla does when it runs a step.
        step: traces the step; what it returns, if anything, are outputs besides.

    Returns:
        A serialised HloModuleProto.
    """
    return trace_numbered(state, step, ()).program


def trace_numbered(
    state: Sequence[torch.Tensor],
    step: Callable[[], Sequence[torch.Tensor] | None],
    asked: Sequence[torch.Tensor],
) -> Traced:
    """Traces one step, and says which of the program's parameters is which tensor.

    Args:
        state, step: as of `trace`.
        asked: placeholders, changed by the step or not.
    """
    # A collective waits for the one before it, and a random number follows the last, in whichever graph they are; the
    # end of a graph that is run parts them, and here no graph is.
    core = torch_xla.device()
    torch_xla._XLAC._set_all_reduce_token(str(core), None)
    xm.set_rng_state(0, core)
    # Tensors of their own on the same data: an in-place operation changes the ones at hand.
    before, asked_before = ([_on_same_data(tensor) for tensor in tensors] for tensors in (state, asked))
    outputs = [*state, *(step() or ())]
    context = torch_xla._XLAC.lowering.LoweringContext("step")
    context.set_name_string("step")
    context.build(outputs)
    parameters = [context.tensor_parameter_id(tensor) for tensor in before]
    aliases = [(output, parameter) for output, parameter in enumerate(parameters) if parameter >= 0]
    program = context.hlo() + _alias_config(aliases, is_tuple=len(outputs) > 1)
    return Traced(program, tuple(context.tensor_parameter_id(tensor) for tensor in asked_before))


def _on_same_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])[1][0]


def hlo_text(program: bytes) -> str:
    """A program as text."""
    return xb.get_computation_hlo(xb.computation_from_module_proto("program", program))


def handles(tensors: Sequence[torch.Tensor]) -> set[int]:
    """What placeholders stand for; asked before anything is traced with them."""
    return set(torch_xla._XLAC._get_tensors_handle(list(tensors)))


def computed(tensor: torch.Tensor, unknown: set[int]) -> torch.Tensor | None:
    """The value of a traced tensor on the host, if nothing of `unknown` goes into it; None otherwise.

    It is run on this machine, so not under `no_execution`.

    Args:
        tensor: of the core.
        unknown: handles of placeholders.
    """
    context = torch_xla._XLAC.lowering.LoweringContext("computed")
    context.build([tensor])
    inputs = list(context.device_parameter_id_tensor_mapping().values())
    if unknown.intersection(torch_xla._XLAC._get_tensors_handle(inputs)):
        return None
    return to_host([tensor])[0]


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """While it is open, torch_xla says that this process is a rank among so many, for a model that asks."""
    with ExitStack() as stack:
        for module, names in ((torch_xla.runtime, ("global_ordinal", "world_size")), (xm, _ORDINALS)):
            for name, value in zip(names, (rank, size), strict=True):
                stack.enter_context(mock.patch.object(module, name, lambda value=value, **_: value, create=True))
        yield


_ORDINALS = ("get_ordinal", "xrt_world_size")


class TracedWorld(Graph):
    """A rank among so many, for tracing: the collectives are instructions of the graph, as on a TPU.

    torch_xla leaves them out of the graph of a single process unless `XLA_ALWAYS_ALLREDUCE=1` was set before it was
    imported.
    """

    def __init__(self, size: int):
        self.rank, self.size, self.kind = 0, size, "tpu"
        self.groups = [list(range(size))]


def _alias_config(aliases: Sequence[tuple[int, int]], is_tuple: bool) -> bytes:
    """Which output takes the place of which parameter.

    Field 8 of HloModuleProto, `input_output_alias`; serialised messages are merged by joining their bytes.

    Source: HloInputOutputAliasProto in openxla/xla, xla/service/hlo.proto (output_shape_index = 1,
    parameter_number = 2, kind = 4, where MAY_ALIAS is 1).
    """
    entries = b""
    for output, parameter in aliases:
        index = field(1, varint(output)) if is_tuple else b""
        entries += field(1, index + whole_number(2, parameter) + whole_number(4, 1))
    return field(8, entries) if entries else b""
