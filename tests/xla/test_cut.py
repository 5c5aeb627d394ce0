"""Parts of a tensor: equal, together the whole, along the axis that wastes least."""

import pytest
import torch

from xla_b2t.xla.cut import Cut, cut_evenly


@pytest.mark.parametrize(
    ("shape", "num_parts", "axis", "part_shape"),
    [
        ((21504, 7168), 8, 0, (2688, 7168)),
        ((45, 512, 512), 8, 1, (45, 64, 512)),
        ((41, 768), 8, 1, (41, 96)),
        ((41,), 8, 0, (6,)),
        ((1, 1, 768), 8, 2, (1, 1, 96)),
        ((2, 3), 8, 1, (2, 1)),
        ((), 8, 0, (1,)),
        ((5, 5), 1, 0, (5, 5)),
        ((0,), 8, 0, (0,)),
        ((5, 0), 8, 1, (5, 0)),
    ],
)
def test_cut_evenly_takes_the_first_axis_with_least_to_fill_in(shape, num_parts, axis, part_shape):
    cut = cut_evenly(shape, num_parts)
    assert cut == Cut(shape, axis, num_parts)
    assert cut.part_shape == part_shape


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (6, 4), (7, 3), (3, 7), (1, 1, 10), (5, 4, 3)])
def test_parts_joined_are_the_whole_again(shape, num_parts):
    whole = torch.randn(shape)
    cut = cut_evenly(shape, num_parts)
    parts = [cut.part(whole, index) for index in range(num_parts)]
    assert {tuple(part.shape) for part in parts} == {cut.part_shape}
    filled = torch.cat(parts, cut.axis)
    assert torch.equal(filled, cut.fill(whole))
    assert filled.square().sum().item() == pytest.approx(whole.square().sum().item()), "what is filled in is zero"
    assert torch.equal(cut.whole(filled), whole)
