"""The loop over time: XLA against the plain loop, and what the built loop is made of."""

import re

import pytest
import torch

from xla_b2t.errors import DtypeError
from xla_b2t.xla import scan as scan_module
from xla_b2t.xla.scan import scan


def cell(carry, x, constants):
    state, count = carry
    row, active = x
    state = torch.where(active, torch.tanh(state @ constants[0] + row), state)
    return (state, count + 1), (state, state * row)


def widening_step(carry, x, constants):
    return (carry[0].float(),), (x[0],)


def scaling_step(carry, x, constants):
    return (carry[0] * 0.37,), (x[0],)


def first_only_step(carry, x, constants):
    return (carry[0] + x[0],), (x[0] - carry[0],)


def sample(dtype=torch.float32, steps=7):
    torch.manual_seed(steps)
    carry = (torch.randn(3, 4, dtype=dtype), torch.zeros(1, dtype=torch.int32))
    xs = (torch.randn(steps, 3, 4, dtype=dtype), torch.rand(steps, 3, 1) < 0.7)
    return carry, xs, (torch.randn(4, 4, dtype=dtype),)


def by_hand(carry, xs, constants, reverse):
    steps = range(xs[0].shape[0])
    rows = {}
    for index in reversed(steps) if reverse else steps:
        carry, rows[index] = cell(carry, tuple(x[index] for x in xs), constants)
    return [*carry, *(torch.stack([rows[index][i] for index in steps]) for i in range(2))]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_of_plain_tensors_equals_the_loop_by_hand(reverse):
    carry, xs, constants = sample()
    last, ys = scan(cell, carry, xs, constants, reverse)
    for found, expected in zip([*last, *ys], by_hand(carry, xs, constants, reverse), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("dtype", "steps", "reverse"), [(torch.float32, 7, True), (torch.bfloat16, 1, False)])
def test_scan_of_xla_tensors_equals_the_plain_loop(on_xla, dtype, steps, reverse):
    carry, xs, constants = sample(dtype, steps)

    def both(state, count, rows, active, weight):
        last, ys = scan(cell, (state, count), (rows, active), (weight,), reverse)
        return *last, *ys

    results, _ = on_xla(both, *carry, *xs, *constants)
    for found, expected in zip(results, by_hand(carry, xs, constants, reverse), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_scan_of_xla_tensors_is_one_loop_without_wide_integers(on_xla):
    carry, xs, constants = sample(steps=50)

    def run(state, count, rows, active, weight):
        return scan(cell, (state, count), (rows, active), (weight,))[1]

    _, text = on_xla(run, *carry, *xs, *constants)
    assert text.count(" while(") == 1
    assert text.count(" tanh(") == 1
    assert not re.findall(r"\b[suf]64\[", text)


def test_scan_in_bfloat16_on_cpu_writes_rows_into_stacks_of_bits(on_xla):
    carry, xs, constants = sample(torch.bfloat16, steps=50)

    def run(state, count, rows, active, weight):
        return scan(cell, (state, count), (rows, active), (weight,))[1]

    (states, products), text = on_xla(run, *carry, *xs, *constants)
    assert (states.dtype, products.dtype) == (torch.bfloat16, torch.bfloat16)
    written = re.findall(r"= (\w+)\[50,3,4\]\S* dynamic-update-slice\(", text)
    assert written == ["u16", "u16"]


def test_scan_of_the_same_shapes_again_uses_the_loop_that_was_built(xla_device):
    xs = torch.ones(5, 2, device=xla_device)
    scan(first_only_step, (xs[0],), (xs,))
    before = len(scan_module._loops)
    scan(first_only_step, (xs[1] + 1,), (xs * 2,))
    assert len(scan_module._loops) == before
    scan(first_only_step, (xs[0],), (xs[:4],))
    assert len(scan_module._loops) == before + 1


def test_scan_with_a_carry_that_changes_its_dtype_names_both(xla_device):
    xs = torch.ones(5, 2, device=xla_device, dtype=torch.bfloat16)
    with pytest.raises(
        DtypeError, match=r"widening_step takes a carry torch.bfloat16 \(2,\) and returns torch.float32 \(2,\)"
    ):
        scan(widening_step, (xs[0],), (xs,))


def test_scan_with_a_number_that_is_no_argument_says_so(xla_device):
    xs = torch.ones(5, 2, device=xla_device)
    with pytest.raises(AssertionError, match="scaling_step uses 1 tensors or numbers that it was not handed"):
        scan(scaling_step, (xs[0],), (xs,))


def test_scan_of_sequences_of_two_lengths_is_refused():
    with pytest.raises(AssertionError, match="one common length"):
        scan(first_only_step, (torch.zeros(2),), (torch.zeros(3, 2), torch.zeros(4, 2)))


def running_step(carry, x, constants):
    (total,) = carry
    now, before = x
    return (total + now * before,), (total + before,)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_hands_the_slice_before_to_a_step(on_xla, reverse):
    first, start = torch.tensor([10.0, 20.0]), torch.zeros(2)
    rows = torch.arange(8.0).view(4, 2)

    def run(start, rows, first):
        carry, ys = scan(running_step, (start,), (rows, rows), reverse=reverse, before_last_x=first)
        return [*carry, *ys]

    laid_out = torch.cat([first[None], rows[:-1]])
    carry, ys = scan(running_step, (start,), (rows, laid_out), reverse=reverse)
    for found in (run(start, rows, first), on_xla(run, start, rows, first)[0]):
        for one, other in zip(found, (*carry, *ys), strict=True):
            assert torch.equal(one, other)
