"""Tracing on placeholders: what is changed in place is donated, nothing is run, a host read is caught."""

import pytest
import torch

from xla_b2t.xla.device import to_device
from xla_b2t.xla.trace import (
    as_rank,
    computed,
    handles,
    hlo_text,
    identity,
    no_execution,
    placeholders,
    trace,
    trace_numbered,
)


def shapes(*sizes):
    return placeholders([torch.empty(size, device="meta") for size in sizes])


def module_of(hlo):
    jaxlib = pytest.importorskip("jaxlib._jax", reason="reads HLO; JAX has wheels for CPython 3.11 and 3.12")
    return jaxlib.XlaComputation(hlo).as_hlo_text()


def test_trace_donates_what_the_step_changes_and_nothing_else():
    with no_execution():
        weight, moment, fixed = shapes((3, 2), (3, 2), (2,))

        def step():
            moment.mul_(0.5).add_(fixed)
            weight.sub_(moment)

        text = module_of(trace([weight, moment], step))
    assert text.count("alias") == 3  # the word, and two buffers
    assert "ENTRY" in text
    assert "->(f32[3,2]{1,0}, f32[3,2]{1,0})" in text


def test_trace_returns_results_beside_the_state():
    with no_execution():
        (weight,) = shapes((4,))
        text = module_of(trace([], lambda: [weight * 2]))
    assert "->(f32[4]{0})" in text
    assert "input_output_alias" not in text


def test_trace_donates_a_parameter_that_is_copied_into():
    with no_execution():
        weight, master = placeholders([torch.empty(4, dtype=dtype, device="meta") for dtype in (torch.bfloat16, None)])
        weight = torch.nn.Parameter(weight)

        def step():
            (weight * weight).sum().backward()
            with torch.no_grad():
                master.sub_(weight.grad.float())
                weight.copy_(master)

        text = module_of(trace([weight, master], step))
    assert text.count("alias") == 3


def test_trace_numbered_says_which_parameter_holds_which_tensor():
    with no_execution():
        weight, factor, unused = shapes((3,), (4, 3), (5,))

        def step():
            return [(factor * weight.mul_(2.0)).sum()]

        traced = trace_numbered([weight], step, [unused, factor, weight])
        text = hlo_text(traced.program)
    missing, *numbers = traced.numbers
    assert missing == -1
    for number, shape in zip(numbers, (r"f32[4,3]{1,0}", r"f32[3]{0}"), strict=True):
        assert f" = {shape} parameter({number})" in text


def test_trace_of_a_step_that_reads_a_value_raises():
    with no_execution():
        (weight,) = shapes((4,))
        with pytest.raises(RuntimeError, match="Unexpected execution"):
            trace([weight], lambda: [weight * weight.sum().item()])


def test_identity_is_of_a_value_and_stays_with_it():
    with no_execution():
        (x,) = shapes((4, 3))
        assert identity(x) == identity(x) > 0
        assert len({identity(tensor) for tensor in (x, x + 1, x.view(3, 4), x.clone())}) == 4
        assert identity(torch.nn.Parameter(x)) > 0


def test_identity_of_a_tensor_elsewhere_is_negative():
    host, lost = torch.zeros(3), torch.zeros(3, device="meta")
    assert identity(host) < 0 and identity(lost) < 0
    assert identity(host) != identity(lost)


def test_hlo_text_of_a_program_names_its_operations():
    with no_execution():
        (x,) = shapes((4, 3))
        text = hlo_text(trace([], lambda: [torch.exp(x)]))
    assert " exponential(f32[4,3]{1,0} " in text
    assert text.startswith("HloModule ")


def test_trace_gives_one_graph_for_one_step_whatever_was_traced_before():
    def text():
        (x,) = shapes((4, 3))
        return hlo_text(trace([], lambda: [torch.nn.functional.dropout(x, 0.5)]))

    with no_execution():
        assert text() == text()


def test_computed_gives_what_follows_from_known_values_alone(xla_device):
    with no_execution():
        (unknown,) = shapes((3,))
        blank = handles([unknown])
        lengths, shift = to_device([torch.tensor([5, 8, 0]), torch.tensor([1, 1, 1])])
        known, mixed = torch.clamp(lengths - 4, min=1) + shift, lengths + unknown
    assert computed(known, blank).tolist() == [2, 5, 2]
    assert computed(mixed, blank) is None


def test_as_rank_tells_torch_xla_for_as_long_as_it_is_open():
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as runtime

    before = runtime.global_ordinal(), runtime.world_size()
    with as_rank(7, 8):
        assert (runtime.global_ordinal(), runtime.world_size()) == (7, 8)
        assert (xm.get_ordinal(), xm.xrt_world_size()) == (7, 8)
    assert (runtime.global_ordinal(), runtime.world_size()) == before
