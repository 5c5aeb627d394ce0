"""The table of chips, against what the TPU's compiler said of each (libtpu 0.0.21)."""

import re

import pytest

from xla_b2t.memory.chips import CHIPS

# What is left for a program, from the compiler's refusals, in GiB; and its `estimated_cycles` for a product of two
# bfloat16 matrices of 4096 x 4096, on one device of the kind.
SAID = {
    "v2": ("Used 10.77G of 7.48G hbm", 4272131),
    "v3": ("Used 21.54G of 15.48G hbm", 2194205),
    "v4": ("Used 43.08G of 30.75G hbm", 555378),
    "v5e": ("Used 21.54G of 15.75G hbm", 1079976),
    "v5p": ("Used 129.43G of 95.74G hbm", 543850),
    "v6e": ("Used 43.08G of 31.25G hbm", 298758),
}


@pytest.mark.parametrize("name", SAID)
def test_chip_has_the_hbm_that_the_compiler_lets_a_program_use(name):
    limit = re.search(r"of ([\d.]+)G hbm", SAID[name][0]).group(1)
    assert f"{CHIPS[name].hbm_bytes / 2**30:.2f}" == limit


@pytest.mark.parametrize("name", SAID)
def test_chip_has_the_clock_at_which_the_estimate_of_a_matmul_is_near_its_peak(name):
    chip = CHIPS[name]
    at_peak = 2 * 4096**3 / (chip.bf16_tflops * 1e12)
    estimate = SAID[name][1] / (chip.clock_ghz * 1e9)
    assert 1.0 < estimate / at_peak < 1.15


@pytest.mark.parametrize(
    ("name", "products_a_cycle"),
    [
        ("v2", 1 * 128**2),
        ("v3", 2 * 128**2),
        ("v4", 2 * 4 * 128**2),
        ("v5e", 4 * 128**2),
        ("v5p", 2 * 4 * 128**2),
        ("v6e", 4 * 256**2),
    ],
)
def test_chip_has_the_peak_that_its_matrix_units_reach_at_its_clock(name, products_a_cycle):
    chip = CHIPS[name]
    assert 2 * products_a_cycle * chip.clock_ghz / 1e3 == pytest.approx(chip.bf16_tflops, rel=0.005)


def test_chips_are_found_by_their_names_and_say_where_they_are_from():
    assert {chip.name: chip for chip in CHIPS.values()} == dict(CHIPS)
    assert all(re.search("https://|doi", chip.source) for chip in CHIPS.values())
