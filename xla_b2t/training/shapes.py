"""What the graphs of a run depend on, and nothing else of it: sizes of the data, buckets, ranks, batches."""

from dataclasses import dataclass

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import plan_batches
from xla_b2t.data.groups import Bucket, GroupSet
from xla_b2t.models.protocol import Sizes, sizes_of


@dataclass(frozen=True)
class Shapes:
    """Every shape of a run.

    Attributes:
        sizes: features, days and classes of the data.
        buckets: lengths of the batches.
        num_ranks: R.
        trials: B of a micro-step in training.
        validation_trials: B of a step in validation.
    """

    sizes: Sizes
    buckets: tuple[Bucket, ...]
    num_ranks: int
    trials: int
    validation_trials: int


def run_shapes(config: Config, group_set: GroupSet, num_ranks: int) -> Shapes:
    """The shapes of a run on these groups.

    Raises:
        UserError: the batch does not go into groups and ranks, as of `plan_batches`.
    """
    plan = plan_batches(config, group_set.group_size, num_ranks)
    sizes = sizes_of(group_set)
    return Shapes(sizes, group_set.buckets, num_ranks, plan.batch_size, plan.validation_batch_size)
