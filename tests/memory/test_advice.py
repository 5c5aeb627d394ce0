"""Which batch is advised: every bucket must take it, and an update stays what it is."""

from xla_b2t.data.batch_plan import BatchPlan
from xla_b2t.memory.advice import CoreBatch, largest_batch, same_update

BATCH = CoreBatch(16, 16)


def line(fixed, *per_trial):
    """HBM on a line for each bucket; summed gradients take 500 more, decoding as much as training."""

    def needs(bucket, batch):
        trials = max(batch.trials, batch.validation_trials)
        return fixed + per_trial[bucket] * trials + 500 * batch.accumulates

    return needs


def advised(needs, limit, batch=BATCH, group_size=8, expected=None):
    found = largest_batch(batch, group_size, [1, 0], limit, needs, expected or needs)
    return found and (found.batch.trials, found.batch.accumulation, found.is_largest)


def test_largest_batch_is_the_most_that_the_neediest_bucket_takes():
    assert advised(line(100, 3, 10), 2000) == (184, 1, True)


def test_largest_batch_goes_on_with_a_bucket_that_was_not_expected_to_need_most():
    assert advised(line(100, 20, 10), 2000, expected=line(100, 3, 10)) == (88, 1, True)


def test_largest_batch_that_is_refused_without_a_figure_is_not_taken():
    def needs(bucket, batch):
        return None if batch.trials > 40 else 10 * batch.trials

    assert advised(needs, 10**6, expected=line(0, 1, 10)) == (40, 1, True)


def test_largest_batch_at_the_end_of_the_search_is_not_said_to_be_the_largest():
    assert advised(line(0, 0, 1), 10**9) == (4096, 1, False)
    assert advised(line(0, 0, 1), 10**9, group_size=12) == (4092, 1, False)


def test_largest_batch_below_a_group_is_judged_with_the_sums_of_its_micro_steps():
    assert advised(line(100, 1, 200), 1400) == (4, 2, True)  # 100 + 800 + 500
    assert advised(line(100, 1, 200), 1399) == (2, 4, True)


def test_largest_batch_where_not_even_single_trials_fit_is_none():
    assert advised(line(100, 1, 200), 799) is None


def test_largest_batch_leaves_validation_of_its_own_as_it_is():
    own = CoreBatch(16, 120)
    assert advised(line(0, 0, 10), 1200, own) == (120, 1, True)
    assert advised(line(0, 0, 10), 1199, own) is None  # decoding alone is too much


def test_same_update_takes_the_fewest_micro_steps():
    plan = BatchPlan(8, 1, 8, 64, 8, 8)  # 8 ranks with 64 trials each
    found = same_update(plan, BATCH, [0, 1], 10**6, line(100, 3, 10))
    assert (found.batch_size, found.accumulation) == (64, 1)
    found = same_update(plan, BATCH, [0, 1], 700, line(100, 3, 10))
    assert (found.batch_size, found.accumulation, found.global_batch) == (8, 8, 512)


def test_same_update_asks_every_bucket():
    plan = BatchPlan(8, 1, 8, 64, 8, 8)
    found = same_update(plan, BATCH, [0, 1], 1200, line(100, 20, 10))
    assert (found.batch_size, found.accumulation) == (16, 4)


def test_same_update_that_nothing_takes_is_none():
    assert same_update(BatchPlan(8, 1, 8, 64, 8, 8), BATCH, [0], 100, line(100, 3)) is None
