"""A number beside a tensor must not widen the graph."""

import re

import torch

from xla_b2t.models.scalars import scalar_like


def test_scalar_like_compares_in_the_dtype_of_the_tensor(on_xla):
    def compare(x, n):
        return x < scalar_like(0.5, x), n == scalar_like(1, n)

    (below, equal), text = on_xla(compare, torch.tensor([0.25, 0.75]).bfloat16(), torch.tensor([1, 2]).int())
    assert below.tolist() == equal.tolist() == [True, False]
    assert not re.findall(r"\b[sf]64\[", text)
