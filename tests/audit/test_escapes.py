"""What would leave the core in the middle of a step, and with what a step goes on in its place."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xla_b2t.audit.escapes import brought_over, escape, foreign, unexpected
from xla_b2t.xla.trace import no_execution, placeholders

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_runs():
    with no_execution():
        yield


def on_core(*shape, dtype=torch.bfloat16):
    (tensor,) = placeholders([torch.empty(shape, dtype=dtype, device="meta")])
    return tensor


class Recorded(TorchDispatchMode):
    """Takes every escape of what is traced, and goes on with its value."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = escape(func, args, kwargs or {})
        if found:
            self.found.append(found)
            return found.value
        return func(*args, **(kwargs or {}))


def escapes_of(step, *tensors):
    """The one thing that leaves the core in a step, and what the step gives in the end."""
    with Recorded() as recorded:
        result = step(*tensors)
    (found,) = recorded.found
    assert found.found and found.expected and found.fix
    return found, result


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.bfloat16, 1.0), (torch.float32, 1.0), (torch.int32, 1), (torch.bool, True)]
)
def test_escape_of_item_is_a_read_of_that_dtype_and_goes_on_with_a_value_of_it(dtype, value):
    found, result = escapes_of(lambda x: x[0].item(), on_core(3, dtype=dtype))
    assert found.kind == "host-read"
    assert found.found == f"a value of {str(dtype).removeprefix('torch.')} () is read by the host"
    assert found.expected == "no read: the core stops for it"
    assert "torch.where" in found.fix
    assert type(result) is type(value) and result == value


def test_escape_of_branch_on_a_value_is_a_read():
    found, result = escapes_of(lambda x: "longer" if (x > 2).any() else "shorter", on_core(3))
    assert found.kind == "host-read" and result == "longer"


@pytest.mark.parametrize("to_host", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: torch.zeros(4, 2).copy_(x)])
def test_escape_of_copy_to_the_host_goes_on_with_a_host_tensor_of_the_shape(to_host):
    found, result = escapes_of(to_host, on_core(4, 2))
    assert (found.kind, found.found) == ("host-read", "bfloat16 (4, 2) is copied to the host")
    assert result.device.type == "cpu" and result.shape == (4, 2)


def test_escape_of_copy_to_the_host_in_another_dtype_keeps_that():
    _, result = escapes_of(lambda x: x.to("cpu", torch.float32), on_core(4, 2))
    assert result.dtype == torch.float32


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (lambda x: x[x > 0], (12,)),
        (lambda x: x.masked_select(x > 0), (12,)),
        (lambda x: x.nonzero(), (12, 2)),
        (lambda x: x.unique(), (1,)),
    ],
)
def test_escape_of_shape_that_depends_on_values_goes_on_as_if_all_were_1(step, shape):
    found, result = escapes_of(step, on_core(4, 3))
    assert found.kind == "data-shape"
    assert "depends on values" in found.found
    assert found.expected == "shapes that are known before"
    assert "torch.where" in found.fix
    result = result[0] if isinstance(result, tuple) else result
    assert tuple(result.shape) == shape
    assert result.device.type == "xla"


def test_escape_of_assignment_through_a_mask_goes_on_with_the_same_shape():
    def step(x):
        x[x > 0] = 0.0
        return x

    found, result = escapes_of(step, on_core(4, 3))
    assert (found.kind, found.expected) == ("data-shape", "shapes that are known before")
    assert found.found == "values are put in where a mask says, through a list of places"
    assert result.shape == (4, 3)


def test_escape_of_operation_without_lowering_goes_on_with_its_shape_and_dtype():
    found, result = escapes_of(lambda x: torch.logaddexp(x, x), on_core(4, 3))
    assert (found.kind, found.expected) == ("host-fallback", "an operation of the core")
    assert found.found == "logaddexp has no lowering for XLA and would run on the host"
    assert "the maximum" in found.fix
    assert (result.shape, result.dtype, result.device.type) == ((4, 3), torch.bfloat16, "xla")


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int32, device=x.device)),
        lambda x: x.softmax(1) @ x.transpose(0, 1),
        lambda x: torch.nn.functional.layer_norm(x, (3,)),
        lambda x: torch.rand(4, 3, device=x.device) + x.float().cumsum(0),
        lambda x: x[:, torch.zeros(2, dtype=torch.int64, device=x.device)],
        lambda x: x.to(torch.float32),
    ],
)
def test_escape_of_operation_that_stays_on_the_core_is_none(step):
    with Recorded() as recorded:
        result = step(on_core(4, 3))
    assert recorded.found == []
    assert result.device.type == "xla"


def test_foreign_finds_tensors_with_axes_of_the_host_and_of_no_device():
    x, host, lost = on_core(3), torch.zeros(3), torch.empty(3, device="meta")
    assert [id(t) for t in foreign(ATEN.add.Tensor, [x, host])] == [id(host)]
    assert [id(t) for t in foreign(ATEN.add.Tensor, [lost, x])] == [id(lost)]
    assert [id(t) for t in foreign(ATEN.cat.default, [x, host])] == [id(host)]
    assert foreign(ATEN.add.Tensor, [x, torch.tensor(2.0)]) == []  # a number
    assert foreign(ATEN.add.Tensor, [x, x]) == []


def test_foreign_lets_an_upload_and_an_index_of_the_host_pass():
    x, host, lost = on_core(3), torch.zeros(3), torch.empty(3, device="meta")
    assert foreign(ATEN.copy_.default, [x, host]) == []
    assert foreign(ATEN._to_copy.default, [host]) == []
    assert foreign(ATEN.index.Tensor, [x, torch.zeros(2, dtype=torch.int64)]) == []
    assert [id(t) for t in foreign(ATEN.copy_.default, [x, lost])] == [id(lost)]


def test_brought_over_replaces_what_is_elsewhere_wherever_it_stands():
    x, host = on_core(3), torch.zeros(3, 2, dtype=torch.float32)
    ((tensors, number), options), stand_ins = brought_over([host], (([x, host], 2), {"out": host}))
    assert tensors[0] is x and number == 2
    assert tensors[1] is options["out"] is stand_ins[0]
    assert (stand_ins[0].device.type, stand_ins[0].shape, stand_ins[0].dtype) == ("xla", (3, 2), torch.float32)


def test_unexpected_read_within_a_lowered_operation_is_a_read_and_within_another_a_fallback():
    x = on_core(4, 3)
    found = unexpected(ATEN.exp.default, (x,), {})
    assert (found.kind, found.found) == ("host-read", "exp needs values on the host")
    assert found.value.shape == (4, 3)
    found = unexpected(ATEN.logaddexp.default, (x, x), {})
    assert (found.kind, found.found) == ("host-fallback", "logaddexp has no lowering for XLA and would run on the host")
