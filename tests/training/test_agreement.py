"""Ranks with other weights are found, and named."""

import numpy as np
import pytest
import torch

from xla_b2t.training.agreement import check_same_weights
from xla_b2t.xla.world import Alone


class Pretended(Alone):
    """Two more ranks that hold the weights given."""

    def __init__(self, others):
        super().__init__("cpu")
        self.size = 3
        self._others = others

    def sum(self, values):
        found = [values]
        for rank, weights in enumerate(self._others, start=1):
            recorder = Recorder(rank, self.size)
            check_same_weights(weights, recorder)
            found.append(recorder.sent)
        return np.sum(found, axis=0)


class Recorder(Alone):
    """Keeps what a rank would send; every rank then seems to agree."""

    def __init__(self, rank, size):
        super().__init__("cpu")
        self.rank, self.size = rank, size

    def sum(self, values):
        self.sent = values
        return np.zeros_like(values)


def weights(change=0.0):
    return {"first": torch.ones(3), "second": torch.full((2, 2), 2.0 + change), "third": torch.zeros(1) + change}


def test_check_same_weights_of_equal_ranks_is_silent():
    check_same_weights(weights(), Pretended([weights(), weights()]))


def test_check_same_weights_names_rank_and_first_parameter():
    with pytest.raises(RuntimeError, match=r"ranks \[2\] hold other weights than rank 0; the first .* is second"):
        check_same_weights(weights(), Pretended([weights(), weights(change=1e-6)]))
