"""What the core held before something was traced, given back after real refusals of XLA's compiler and runtime."""

import pytest
import torch
import torch_xla

from xla_b2t.xla.compile_guard import _num_compiles
from xla_b2t.xla.device import sync, to_device, to_host
from xla_b2t.xla.kept import Kept

pytestmark = pytest.mark.usefixtures("xla_device")

ONE_ROW = list(range(41))


def make():
    moment, values = to_device([torch.arange(41.0), torch.ones(3, 41)])
    return torch.nn.Parameter(values), moment


def step(parameter, moment, then=None):
    with torch.no_grad():
        parameter.mul_(moment)
        moment.add_(parameter.sum(0))
        if then:
            moment.add_(then(moment))


def no_kernel(moment):
    """No compiler of a CPU takes this."""
    return torch_xla._XLAC._xla_tpu_custom_call([moment], "nonsense", [(41,)], [torch.float32])[0]


def no_memory(moment):
    """Compiles, and needs more than a petabyte to run."""
    numbers = torch.arange(20_000_000, device=moment.device, dtype=torch.float32)
    return (numbers.unsqueeze(1) * moment.sum() + numbers).sort(1)[0].sum()


@pytest.mark.parametrize(("then", "said"), [(no_kernel, "custom call"), (no_memory, "Out of memory allocating")])
def test_kept_tensors_are_put_back_after_a_refusal_and_lead_to_the_usual_graph(then, said):
    state = make()
    step(*state)
    sync(wait=True)
    kept = Kept(list(state))
    with pytest.raises((RuntimeError, ValueError), match=said):
        refused(state, then)
    assert kept.is_there()
    kept.put_back()
    sync()
    assert to_host([state[0].detach()])[0].tolist() == [ONE_ROW] * 3
    assert to_host([state[1]])[0].tolist() == [4 * number for number in ONE_ROW]

    before, kept = _num_compiles(), Kept(list(state))
    step(*state)
    sync(wait=True)
    assert _num_compiles() == before, "the graph of every other step"
    assert not kept.is_there(), "the old buffers were donated to the new values, as without keeping"
    assert to_host([state[1]])[0].tolist() == [4 * number + 12 * number**2 for number in ONE_ROW]


def refused(state, then):
    """In a function of its own, so that nothing of the refused graph stays alive."""
    step(*state, then)
    sync()
    to_host([state[1]])


def test_kept_tensors_undo_what_was_traced_and_not_started():
    state = make()
    kept = Kept(list(state))
    step(*state)
    kept.put_back()
    sync()
    assert to_host([state[1]])[0].tolist() == ONE_ROW


def test_kept_of_nothing_is_there():
    assert Kept([]).is_there()
