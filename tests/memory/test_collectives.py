"""What collectives send, by the formulas of a ring."""

import dataclasses

import pytest

from xla_b2t.memory.chips import CHIPS
from xla_b2t.memory.collectives import collective_in, ring_gb_s, sent_bytes
from xla_b2t.memory.compiled_program import parse

ARRAY = "f32[64,128]{1,0:T(8,128)}"
ARRAY_BYTES = 64 * 128 * 4
INSIDE = """%wrapped (w: f32[64,128]) -> f32[8,128] {
  %w.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %scattered.1 = f32[8,128]{1,0} reduce-scatter(%w.1), replica_groups={}, dimensions={0}, to_apply=%add
}
"""


def sent(line, num_cores=8):
    text = f"HloModule one\n\n{INSIDE}\nENTRY %one (a: f32[64,128]) -> f32[] {{\n  %a = {ARRAY} parameter(0)\n"
    program = parse(text + f"  %b = f32[16,128]{{1,0:S(1)}} parameter(1)\n  ROOT %x = {line}\n}}\n")
    collective = collective_in(program, program.computations["one"][-1])
    return None if collective is None else sent_bytes(program, collective, num_cores)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{ARRAY} all-reduce(%a), replica_groups={{}}, to_apply=%add", 2 * 7 / 8 * ARRAY_BYTES),
        (f"({ARRAY}, f32[16,128]) all-reduce(%a, %b), to_apply=%add", 2 * 7 / 8 * ARRAY_BYTES * 1.25),
        (f"{ARRAY} all-reduce(%a), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add", ARRAY_BYTES),
        (f"{ARRAY} all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add", 2 * 3 / 4 * ARRAY_BYTES),
        (f"{ARRAY} all-reduce-start(%a), replica_groups={{}}, to_apply=%add", 2 * 7 / 8 * ARRAY_BYTES),
        ("f32[512,128]{1,0} all-gather(%a), replica_groups={}, dimensions={0}", 7 * ARRAY_BYTES),
        ("f32[8,128]{1,0} reduce-scatter(%a), replica_groups={}, to_apply=%add", 7 / 8 * ARRAY_BYTES),
        (f"{ARRAY} all-to-all(%a), replica_groups={{}}, dimensions={{0}}", 7 / 8 * ARRAY_BYTES),
        (f"{ARRAY} collective-permute(%a), source_target_pairs={{{{0,1}},{{1,0}}}}", 2 * ARRAY_BYTES),
        ("((f32[64,128]), f32[8,128], u32[]) async-start(%a), calls=%wrapped", 7 / 8 * ARRAY_BYTES),
        ("f32[8,128]{1,0} fusion(%a), kind=kCustom, calls=%wrapped", 7 / 8 * ARRAY_BYTES),
        (f"{ARRAY} all-reduce-done(%a)", None),
        (f"{ARRAY} negate(%a)", None),
    ],
)
def test_sent_bytes_are_those_of_a_ring(line, expected):
    assert sent(line) == expected


def test_sent_bytes_of_a_core_alone_are_none():
    assert sent(f"{ARRAY} all-reduce(%a), replica_groups={{}}, to_apply=%add", num_cores=1) == 0


@pytest.mark.parametrize(("name", "share"), [("v5e", 2 / 4), ("v6e", 2 / 4), ("v4", 2 / 6), ("v5p", 2 / 6), ("v3", 1)])
def test_ring_has_two_links_of_a_chip(name, share):
    chip = dataclasses.replace(CHIPS[name], ici_gb_s=240.0)
    assert ring_gb_s(chip) == pytest.approx(240 * share)
