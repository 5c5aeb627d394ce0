import numpy as np
import pytest
import torch

from xla_b2t.data import bfloat16


def test_to_bits_random_and_tied_values_round_as_torch_does():
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(20_000) * 10.0 ** generator.integers(-38, 38, 20_000)).astype(np.float32)
    halfway = ((generator.integers(0, 0x7F7F, 2_000).astype(np.uint32) << 16) | 0x8000).view(np.float32)
    values = np.concatenate([values, halfway, -halfway, np.array([0.0, -0.0, bfloat16.LARGEST], np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16.to_bits(values), expected)


def test_to_bits_strided_input_keeps_its_shape():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    assert bfloat16.to_bits(values).shape == (4, 3)
    np.testing.assert_array_equal(bfloat16.from_bits(bfloat16.to_bits(values)), values)


def test_largest_is_the_last_that_stays_finite():
    assert float(torch.finfo(torch.bfloat16).max) == bfloat16.LARGEST


def test_write_bits_are_those_of_to_bits_over_several_pieces():
    values = np.random.default_rng(0).integers(0, 1 << 32, 200_001, np.uint32).view(np.float32)
    values = values[np.abs(values) <= bfloat16.LARGEST]  # every size, ties among them
    values[:1000].view(np.uint32)[:] &= 0xFFFF8000
    bits = np.full(values.shape, 7, np.uint16)
    assert bfloat16.write_bits(values, bits)
    np.testing.assert_array_equal(bits, bfloat16.to_bits(values))


@pytest.mark.parametrize(
    "pattern", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7F8000, 0xFF7FFFFF]
)
def test_write_bits_of_what_bfloat16_cannot_hold_say_so(pattern):
    values = np.zeros(100_000, np.float32)
    values.view(np.uint32)[70_000] = pattern
    assert not bfloat16.write_bits(values, np.empty(values.shape, np.uint16))
