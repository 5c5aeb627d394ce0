"""Loop over time without unrolling it: one `While` for XLA tensors, a Python loop for plain ones.

In: a step function on tuples of tensors, the carry, the sequences, the constants. Out: the last carry and the stacked
outputs. There is no gradient here: a differentiable layer calls this twice from an `autograd.Function`
(`models/gru.py`, `models/ctc.py`), which is what keeps a weight gradient from being stacked once a time step.

torch_xla has a scan of its own. This one is used instead because it
- leaves out AOTAutograd (slow at the first call, not thread-safe, and it saves activations nobody asked for);
- keeps the built loop, so that a later step only looks it up (torch_xla traces and lowers the body at every step);
- takes constants, which stay out of the carry, and can run from the end to the start without a flip;
- counts in int32: there is no 64-bit integer in the program.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xla_b2t.errors import DtypeError
from xla_b2t.xla.target import runs_on_tpu

Tensors = tuple[Tensor, ...]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]

# Loops already built, by step function, shapes and dtypes. A loop is a pure value: whoever builds it gets the same one.
_loops: dict[Any, tuple[Any, list[tuple[torch.Size, torch.dtype]]]] = {}
_building = threading.Lock()


def scan(
    step: Step,
    carry: Tensors,
    xs: Tensors,
    constants: Tensors = (),
    reverse: bool = False,
    before_last_x: Tensor | None = None,
) -> tuple[Tensors, Tensors]:
    """Applies `step` along the leading axis of `xs`.

    Args:
        step: `step(carry, x, constants) -> (carry, y)` on tuples of tensors; a function of a module (it is a key of the
            cache), pure, without random numbers. It must not use a tensor that it is not handed, nor a Python number
            other than 0 and 1 as an operand: torch_xla makes a device tensor of those.
        carry: the first carry. `step` must return the same shapes and dtypes.
        xs: sequences with one common leading axis, at least 1 long; `step` gets a slice of each.
        constants: handed to every step unchanged.
        reverse: from the last slice to the first. Outputs keep the place of the slice they belong to.
        before_last_x: if given, of the last sequence a step gets the slice one place before its own, and this at place
            0. The shifted sequence is not laid out.

    Returns:
        The last carry, and for each `y` the outputs of all steps stacked on a new leading axis.

    Raises:
        DtypeError: the carry changes its shape or dtype in a step.
    """
    assert xs and all(x.shape[0] == xs[0].shape[0] for x in xs), "sequences of one common length are needed"
    edge = () if before_last_x is None else (before_last_x,)
    with torch.no_grad():
        if xs[0].device.type == "xla":
            return _scan_xla(step, carry, xs, constants, edge, reverse)
        return _scan_plain(step, carry, xs, constants, edge, reverse)


def _scan_plain(
    step: Step, carry: Tensors, xs: Tensors, constants: Tensors, edge: Tensors, reverse: bool
) -> tuple[Tensors, Tensors]:
    length = xs[0].shape[0]
    rows: list[Tensors] = [()] * length
    columns = [x.unbind(0) for x in xs]
    if edge:
        columns[-1] = (*edge, *columns[-1][:-1])
    slices = list(zip(*columns, strict=True))
    for index in reversed(range(length)) if reverse else range(length):
        carry, rows[index] = step(carry, slices[index], constants)
    return carry, tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _scan_xla(
    step: Step, carry: Tensors, xs: Tensors, constants: Tensors, edge: Tensors, reverse: bool
) -> tuple[Tensors, Tensors]:
    import torch_xla

    groups = (carry, xs, constants, edge)
    is_for_cpu = not runs_on_tpu()
    key = (step, reverse, is_for_cpu, tuple(tuple((t.shape, t.dtype) for t in group) for group in groups))
    with _building:
        if key not in _loops:
            _loops[key] = _build_loop(step, *groups, reverse, is_for_cpu)
    outputs = torch_xla._XLAC._xla_user_computation("xla::scan", [*carry, *xs, *constants, *edge], _loops[key])
    return tuple(outputs[: len(carry)]), tuple(outputs[len(carry) :])


def _build_loop(
    step: Step, carry: Tensors, xs: Tensors, constants: Tensors, edge: Tensors, reverse: bool, is_for_cpu: bool
) -> Any:
    """The loop as one computation: (carry, xs, constants, edge) -> (carry, ys).

    XLA:CPU has no bfloat16 of its own. To write one row into a bfloat16 stack it converts the whole stack to float32
    and back, at every step, so that the time of a loop grows with the square of its length. There the stacks hold the
    bits as integers, and become numbers again after the loop.
    """
    import torch_xla.core.xla_builder as xb

    length = xs[0].shape[0]
    body, body_inputs, ys_like = _lower_step(step, carry, xs, constants)
    builder = xb.create_builder("scan")
    inputs = [xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate((*carry, *xs, *constants, *edge))]
    kinds = [xb.Op.from_torch_type(y.dtype) for y in ys_like]
    kept = [xb.Type.U16 if is_for_cpu and kind == xb.Type.BF16 else kind for kind in kinds]
    stacks = [xb.Op.zero(builder, kind).broadcast((length, *y.shape)) for kind, y in zip(kept, ys_like, strict=True)]
    first_x, first_constant, first_stack = len(carry), len(carry) + len(xs), len(inputs)

    def scalar(value: int) -> Any:
        return xb.Op.scalar(builder, value, xb.Type.S32)

    def again(counter, *state):
        return counter < xb.Op.scalar(counter.builder(), length, xb.Type.S32)

    def turn(counter, *state):
        def number(value: int) -> Any:
            return xb.Op.scalar(counter.builder(), value, xb.Type.S32)

        index = number(length - 1) - counter if reverse else counter
        state = list(state)
        values = state[:first_stack]
        for i in range(first_x, first_constant):
            values[i] = _slice(state[i], index)
        if edge:
            before = _slice(state[first_constant - 1], (index - number(1)).max(number(0)))
            values[first_constant - 1] = (index > number(0)).select(before, values[-1])
        result = xb.Op.call(body, [values[i] for i in body_inputs])
        for i in range(len(carry)):
            state[i] = result.get_tuple_element(i)
        for i in range(len(stacks)):
            y = result.get_tuple_element(len(carry) + i).broadcast([1])
            y = y if kept[i] == kinds[i] else y.bitcast(kept[i])
            place = [index] + [number(0)] * (y.shape().rank - 1)
            state[first_stack + i] = state[first_stack + i].dynamic_update_slice(y, place)
        return (counter + number(1), *state)

    loop = xb.Op.mkwhile([scalar(0), *inputs, *stacks], again, turn)
    last = [loop.get_tuple_element(1 + i) for i in range(len(carry))]
    ys = [loop.get_tuple_element(1 + first_stack + i) for i in range(len(stacks))]
    ys = [y if kept[i] == kinds[i] else y.bitcast(kinds[i]) for i, y in enumerate(ys)]
    return xb.Op.tuple([*last, *ys]).build("scan")


def _slice(sequence: Any, index: Any) -> Any:
    sizes = list(sequence.shape().sizes)
    start = [index] + [index.zeros_like()] * (len(sizes) - 1)
    return sequence.dynamic_slice(start, [1, *sizes[1:]]).reshape(sizes[1:])


def _lower_step(step: Step, carry: Tensors, xs: Tensors, constants: Tensors) -> tuple[Any, list[int], list[Tensor]]:
    """Traces the step once on placeholders.

    Returns:
        The computation of one step; for each of its parameters the index in (carry, xs, constants); its outputs `y`.
    """
    import torch_xla
    import torch_xla.core.xla_builder as xb

    blanks = [xb.create_placeholder_tensor(t.shape, t.dtype) for t in carry]
    blanks += [xb.create_placeholder_tensor(t.shape[1:], t.dtype) for t in xs]
    blanks += [xb.create_placeholder_tensor(t.shape, t.dtype) for t in constants]
    first_x, first_constant = len(carry), len(carry) + len(xs)
    carry_out, ys = step(tuple(blanks[:first_x]), tuple(blanks[first_x:first_constant]), tuple(blanks[first_constant:]))
    for before, after in zip(carry, carry_out, strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise DtypeError(
                f"{step.__name__} takes a carry {before.dtype} {tuple(before.shape)} "
                f"and returns {after.dtype} {tuple(after.shape)}"
            )
    context = torch_xla._XLAC.lowering.LoweringContext("ScanStep")
    context.set_name_string("scan_step")
    context.build([*carry_out, *ys])
    indices = {context.tensor_parameter_id(blank): i for i, blank in enumerate(blanks)}
    indices.pop(-1, None)  # a value the step does not use is no parameter of it
    foreign = set(context.device_parameter_id_tensor_mapping()) - set(indices)
    assert not foreign, f"{step.__name__} uses {len(foreign)} tensors or numbers that it was not handed: pass constants"
    body = xb.computation_from_module_proto("scan_step", context.hlo())
    return body, [indices[i] for i in range(len(indices))], list(ys)
