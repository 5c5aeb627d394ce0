"""Predicted times against times by hand, on a device whose rates are round."""

import dataclasses

import pytest

from xla_b2t.memory.chips import Chip
from xla_b2t.memory.step_time import predict
from xla_b2t.memory.timeline import HBM, LINKS, MATRIX, OTHER

# A million cycles, 10^9 bytes of HBM, 10^11 operations and 10^8 bytes to other chips take a ms; of all but the cycles
# nine tenths are reached.
CHIP = Chip("v5e", 1.0, 2**34, 0, 1000.0, 100.0, 200.0, 2**27, "made up")
START_MS, REACHED = 1.2e-3, 0.9
VECTOR = 2048 * 1e6  # element-wise instructions a ms
ARRAY = "f32[4096,2048]{1,0:T(8,128)}"
ON_CHIP = "f32[4096,2048]{1,0:T(8,128)S(1)}"
ELEMENTS = 4096 * 2048
COPY_MS = 2 * ELEMENTS * 4 / 1e9 / REACHED


def estimate(cycles, windows="1", source="model.py"):
    """What the compiler writes behind an operation, whose line in the model is the number of its cycles."""
    bounds = ",".join(f'"{bound}"' for bound in windows.split("x"))
    noted = f'metadata={{source_file="{source}" source_line={cycles}}}, backend_config='
    return f'{noted}{{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":[{bounds}]}}}}'


def step(*lines, before="", cores=8, chip=CHIP):
    """The prediction for a program of these lines."""
    inside = "\n".join(f"  {line}" for line in (f"%a = {ARRAY} parameter(0)", *lines))
    text = f"HloModule one, is_scheduled=true\n\n{before}\nENTRY %one (a: f32[]) -> f32[] {{\n{inside}\n}}\n"
    return predict(text, chip, cores)


def test_matmul_takes_what_the_compiler_estimates():
    """2 x 4096 x 2048 x 512 operations at their peak rate are 0.086 ms."""
    product = "f32[4096,512]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf"
    b = "%b = f32[2048,512]{1,0:T(8,128)} parameter(1)"
    found = step(b, f"ROOT %x = {product}, {estimate(90_000)}")
    assert found.ms == pytest.approx(0.090)
    assert (found.limit, found.flops) == (MATRIX, 2 * 4096 * 2048 * 512)


def test_matmul_takes_no_longer_than_its_work_window_for_window():
    product = "f32[4096,512]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf"
    b = "%b = f32[2048,512]{1,0:T(8,128)} parameter(1)"
    found = step(b, f"ROOT %x = {product}, {estimate(900_000, '5x2')}")
    matrix = 2 * 4096 * 2048 * 512 / 1e11 / REACHED
    memory = (4096 * 2048 + 2048 * 512 + 4096 * 512) * 4 / 1e9 / REACHED
    vector = 2 * 4096 * 512 / VECTOR
    assert found.ms == pytest.approx(START_MS + matrix + (memory + vector) / 10)
    assert found.compiler_ms == pytest.approx(0.9)


def test_copy_takes_its_bytes_though_the_compiler_estimates_more():
    found = step(f"ROOT %x = {ARRAY} copy(%a), {estimate(1_000_000, '64')}")
    assert found.ms == pytest.approx(START_MS + COPY_MS + 3 * ELEMENTS / VECTOR / 64)
    assert (found.limit, found.hbm_bytes) == (HBM, 2 * ELEMENTS * 4)


def test_copy_that_changes_the_order_takes_what_the_compiler_estimates():
    found = step(f"ROOT %x = f32[4096,2048]{{0,1:T(8,128)}} copy(%a), {estimate(1_000_000, '64')}")
    assert (found.ms, found.limit) == (pytest.approx(1.0), OTHER)


def test_operation_without_an_estimate_takes_its_bytes():
    found = step(f"ROOT %x = {ARRAY} copy(%a)")
    assert (found.ms, found.compiler_ms) == (pytest.approx(COPY_MS), 0)


def test_operation_on_chip_moves_nothing():
    found = step(f"%b = {ON_CHIP} parameter(1)", f"ROOT %x = {ON_CHIP} negate(%b), {estimate(5000)}")
    assert (found.ms, found.hbm_bytes, found.limit) == (pytest.approx(0.005), 0, OTHER)


BODY = f"""%body (p: (s32[], f32[4096,2048])) -> (s32[], f32[4096,2048]) {{
  %p.1 = (s32[], {ARRAY}) parameter(0)
  %i.1 = s32[]{{:T(128)S(6)}} get-tuple-element(%p.1), index=0
  %one.1 = s32[]{{:T(128)S(6)}} constant(1)
  %next.1 = s32[]{{:T(128)S(6)}} add(%i.1, %one.1)
  %x.1 = {ARRAY} get-tuple-element(%p.1), index=1
  %INSIDE%
  ROOT %t.1 = (s32[], {ARRAY}) tuple(%next.1, %work.1)
}}
%condition (p: (s32[], f32[4096,2048])) -> pred[] {{
  %p.2 = (s32[], {ARRAY}) parameter(0)
  %bound.2 = s32[] constant(5)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %less.2 = pred[] compare(%i.2, %bound.2), direction=LT
}}
"""
WORK = f"%work.1 = f32[4096,2048]{{1,0:T(8,128)}} sort(%x.1), {estimate(2000)}"
LOOP = [
    "%start = s32[] constant(0)",
    f"%state = (s32[], {ARRAY}) tuple(%start, %a)",
    f"%loop = (s32[], {ARRAY}) while(%state), condition=%condition, body=%body",
    f"ROOT %out = {ARRAY} get-tuple-element(%loop), index=1",
]


def test_loop_counts_by_its_trips():
    found = step(*LOOP, before=BODY.replace("%INSIDE%", WORK))
    assert (found.ms, found.loop_ms) == (pytest.approx(5 * 0.002), pytest.approx(5 * 0.002))
    assert found.unknown_loops == ()


def test_loop_of_no_trips_takes_nothing():
    assert step(*LOOP, before=BODY.replace("%INSIDE%", WORK).replace("constant(5)", "constant(0)")).ms == 0


def test_loop_whose_trips_depend_on_data_counts_once_and_is_named():
    lines = [line.replace("constant(0)", "parameter(1)") for line in LOOP]
    found = step(*lines, before=BODY.replace("%INSIDE%", WORK))
    assert (found.ms, found.unknown_loops) == (pytest.approx(0.002), ("loop",))


def test_loop_that_starts_a_copy_for_its_next_turn_takes_the_copy_each_turn():
    early = f"{WORK}\n  %early.1 = ({ON_CHIP}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%work.1)"
    found = step(*LOOP, before=BODY.replace("%INSIDE%", early))
    assert found.ms == pytest.approx(5 * (0.002 + COPY_MS / 2))


BRANCHES = "".join(
    f"%{name} (p: f32[4096,2048]) -> f32[4096,2048] {{\n  %p.{name} = {ARRAY} parameter(0)\n"
    f"  ROOT %work.{name} = {ARRAY} sort(%p.{name}), {estimate(cycles)}\n}}\n"
    for name, cycles in (("cheap", 1000), ("dear", 3000), ("middling", 2000))
)


@pytest.mark.parametrize(
    "named",
    ["branch_computations={%cheap, %dear, %middling}", "true_computation=%dear, false_computation=%cheap"],
)
def test_conditional_takes_its_costliest_branch(named):
    lines = ["%k = s32[] parameter(1)", f"ROOT %x = {ARRAY} conditional(%k, %a, %a), {named}"]
    assert step(*lines, before=BRANCHES).ms_by_source == {"model.py:3000": pytest.approx(0.003)}


EARLY = [
    f"%early = ({ON_CHIP}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%a)",
    f"%there = {ON_CHIP} copy-done(%early)",
]
HALF_MS = COPY_MS / 2  # one of its ends is on the chip


def test_loop_whose_counter_comes_from_afar_counts_once():
    """So long a chain of scalars is not followed."""
    far = ["%n0 = s32[] parameter(1)", *(f"%n{i + 1} = s32[] negate(%n{i})" for i in range(2000))]
    lines = [line.replace("constant(0)", "negate(%n2000)") for line in LOOP]
    assert step(*far, *lines, before=BODY.replace("%INSIDE%", WORK)).unknown_loops == ("loop",)


def test_program_that_only_moves_bytes_takes_their_time():
    found = step(*EARLY)
    assert (found.ms, found.limit, found.hbm_bytes) == (pytest.approx(HALF_MS), HBM, ELEMENTS * 4)


@pytest.mark.parametrize(("cycles", "waits_ms"), [(10_000, HALF_MS - 0.010), (100_000, 0)])
def test_copy_that_is_started_early_is_waited_for_as_far_as_it_is_not_done(cycles, waits_ms):
    between = f"%work = {ON_CHIP} sort(%b), {estimate(cycles)}"
    found = step(f"%b = {ON_CHIP} parameter(1)", EARLY[0], between, EARLY[1])
    assert found.ms == pytest.approx(cycles / 1e6 + waits_ms)


def test_copies_that_are_started_early_run_one_after_the_other():
    later = [line.replace("early", "later").replace("there", "here") for line in EARLY]
    assert step(EARLY[0], later[0], EARLY[1], later[1]).ms == pytest.approx(2 * HALF_MS)


def test_copy_has_no_time_beside_an_operation_that_keeps_hbm_busy():
    found = step(EARLY[0], f"%b = {ARRAY} copy(%a)", EARLY[1])
    assert found.ms == pytest.approx(COPY_MS + HALF_MS)


def test_slice_that_is_started_early_takes_its_own_bytes():
    part = "f32[1024,2048]{1,0:T(8,128)S(1)}"
    found = step(
        f"%early = (({ARRAY}), {part}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:1024], [0:2048]}}",
        f"%there = {part} slice-done(%early)",
    )
    assert found.ms == pytest.approx(HALF_MS / 4)


REDUCED_MS = 2 * 7 / 8 * ELEMENTS * 4 / 1e8 / REACHED


def test_collective_takes_its_bytes_over_two_links():
    found = step(f"ROOT %x = {ARRAY} all-reduce(%a), replica_groups={{}}, to_apply=%add")
    assert (found.ms, found.limit) == (pytest.approx(REDUCED_MS), LINKS)
    assert found.sent_bytes == 2 * 7 / 8 * ELEMENTS * 4


def test_collective_that_is_started_early_runs_beside_operations():
    found = step(
        f"%begun = {ARRAY} all-reduce-start(%a), replica_groups={{}}, to_apply=%add",
        f"%work = {ARRAY} sort(%a), {estimate(100_000)}",
        f"ROOT %done = {ARRAY} all-reduce-done(%begun)",
    )
    assert found.ms_by_limit == {LINKS: pytest.approx(REDUCED_MS - 0.1), HBM: pytest.approx(0.1)}


def kernel(flops):
    return (
        f'{ARRAY} custom-call(%a), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"0"}}}}}}'
    )


@pytest.mark.parametrize(
    ("flops", "ms", "limit"), [(10**9, COPY_MS, HBM), (10**11, 1 / REACHED, MATRIX)], ids=["bytes", "products"]
)
def test_kernel_takes_its_products_or_its_bytes(flops, ms, limit):
    found = step(f"ROOT %x = {kernel(flops)}")
    assert (found.ms, found.kernel_ms, found.limit) == (pytest.approx(ms), pytest.approx(ms), limit)


def test_kernel_has_one_of_two_cores():
    found = step(f"ROOT %x = {kernel(10**11)}", chip=dataclasses.replace(CHIP, name="v5p"))
    assert (found.ms, found.flops) == (pytest.approx(2 / REACHED), 10**11)


def test_line_of_what_the_compiler_added_is_the_one_it_was_added_for():
    found = step(*EARLY, f"%work = {ARRAY} sort(%there), {estimate(1000)}")
    assert found.ms_by_source == {"model.py:1000": pytest.approx(HALF_MS + 0.001)}
    assert step(*EARLY).ms_by_source == {"copy-start": 0, "copy-done": pytest.approx(HALF_MS)}


def test_names_without_work_take_nothing():
    found = step(
        f"%b = {ON_CHIP} bitcast(%a)",
        f'%c = {ON_CHIP} custom-call(%b), custom_call_target="ConcatBitcast"',
        f"ROOT %t = ({ON_CHIP}) tuple(%c)",
    )
    assert (found.ms, found.parts, found.limit) == (0, (), OTHER)
