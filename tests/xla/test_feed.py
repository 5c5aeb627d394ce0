"""Batches arrive whole and in order, or the reason why not does."""

import threading

import numpy as np
import pytest
import torch

from xla_b2t.data.groups import Batch
from xla_b2t.errors import UserError
from xla_b2t.xla.feed import Feed


def make_batch(number, trials=2, bins=16, features=4):
    values = torch.arange(trials * bins * features, dtype=torch.float32).reshape(trials, bins, features) + number
    counts_B = np.full(trials, number, np.int32)
    return Batch(
        features_BTC=values.bfloat16().view(torch.uint16).numpy(),
        input_bins_B=counts_B,
        labels_BL=np.full((trials, 8), number, np.int32),
        label_lengths_B=counts_B,
        required_steps_B=counts_B,
        days_B=counts_B,
        valid_B=np.array([True, number % 2 == 0]),
        trial_ids=("a", "b"),
    )


def test_feed_of_batches_keeps_order_values_and_dtypes(xla_device):
    batches = [make_batch(number) for number in range(7)]
    with Feed(batches, 7, xla_device) as feed:
        found = list(feed)
    assert len(found) == 7
    for number, batch in enumerate(found):
        assert {tensor.device.type for tensor in batch} == {"xla"}
        assert batch.features_BTC.dtype == torch.bfloat16 and batch.valid_B.dtype == torch.bool
        assert {getattr(batch, name).dtype for name in batch._fields[1:6]} == {torch.int32}
        expected = torch.from_numpy(make_batch(number).features_BTC).view(torch.bfloat16)
        torch.testing.assert_close(batch.features_BTC.cpu(), expected, rtol=0, atol=0)
        assert batch.days_B.cpu().tolist() == [number, number]
        assert batch.valid_B.cpu().tolist() == [True, number % 2 == 0]


def test_feed_whose_reader_fails_raises_after_the_batches_before(xla_device):
    def read():
        yield make_batch(0)
        yield make_batch(1)
        raise UserError("the group is damaged", "train.h5:/groups/0002", "pre-batch again")

    found = []
    with Feed(read(), 5, xla_device) as feed, pytest.raises(UserError) as caught:
        found.extend(batch.days_B.cpu()[0].item() for batch in feed)
    assert found == [0, 1]
    assert caught.value.where == "train.h5:/groups/0002"


def test_feed_that_ends_early_says_how_many_are_missing(xla_device):
    with Feed([make_batch(0)], 3, xla_device) as feed, pytest.raises(RuntimeError, match="ended after 1 of 3 batches"):
        list(feed)


@pytest.mark.parametrize("taken", [0, 1])
def test_feed_left_early_ends_its_threads(xla_device, taken):
    before = threading.active_count()

    def read():
        for number in range(10_000):
            yield make_batch(number)

    with Feed(read(), 10_000, xla_device, ahead=2) as feed:
        batches = iter(feed)
        for _ in range(taken):
            next(batches)
    assert threading.active_count() == before
