"""Tracing on placeholders: what is changed in place is donated, nothing is run, a host read is caught."""

import pytest
import torch

from xla_b2t.xla.trace import no_execution, placeholders, trace


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


def test_trace_of_a_step_that_reads_a_value_raises():
    with no_execution():
        (weight,) = shapes((4,))
        with pytest.raises(RuntimeError, match="Unexpected execution"):
            trace([weight], lambda: [weight * weight.sum().item()])
