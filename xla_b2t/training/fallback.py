"""What a run does when its cores have no memory for its batch: the same updates, in smaller micro-steps.

In: the plan of the batch, and that it was refused. Out: the next plan, what to tell of it, or the error that ends the
run. What an update is stays: its trials, its learning rate, what it counts for in an epoch. Only HBM is cured this way,
and whatever else runs out is told as what it is. That ranks know alike what happened is the part of `xla/attempt.py`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import BatchPlan
from xla_b2t.errors import UserError
from xla_b2t.xla.attempt import OutOfHbm, who
from xla_b2t.xla.out_of_memory import Memory, exhausted, in_short, not_cured

_PLAN = "see what takes the memory with xla_b2t plan-memory"
_LIFTING = (
    "train.batch_size, train.global_batch, train.accumulation, validation.batch_size, optimizer.sharded, "
    "data.prefetch_mb, model.options.kernel"
)


@dataclass(frozen=True)
class Fallback:
    """One step down.

    Attributes:
        step: the update that is tried again, from 0.
        input_bins: of the bucket that was refused.
        before, after: the batch.
        refused: by whom, and what was said.
    """

    step: int
    input_bins: int
    before: BatchPlan
    after: BatchPlan
    refused: OutOfHbm

    def in_words(self) -> str:
        """A line for the user."""
        return (
            f"out of HBM in the bucket of {self.input_bins} bins at {_a_core(self.before)} "
            f"({who(self.refused.ranks)}): going on with {self.after.micro_steps_in_words()}; the effective batch "
            f"of {self.after.global_batch} is "
            f"unchanged; retrying step {self.step + 1}"
        )

    def values(self) -> dict[str, object]:
        """For the event log."""
        return {
            "input_bins": self.input_bins,
            "ranks": list(self.refused.ranks),
            "text": self.refused.text,
            "batch_size": self.after.batch_size,
            "accumulation": self.after.accumulation,
            "batch_size_before": self.before.batch_size,
            "accumulation_before": self.before.accumulation,
        }


def fall_back(plan: BatchPlan, refused: OutOfHbm, step: int, input_bins: int, largest: BatchPlan) -> Fallback:
    """The next smaller batch.

    Args:
        plan: what was refused.
        refused: how; the same on all ranks, so that they come to the same answer.
        step: the update, from 0.
        input_bins: of its bucket.
        largest: the plan that the run was configured with.

    Raises:
        UserError: the batch was a single trial.
    """
    smaller = plan.smaller()
    if smaller is None:
        tried = [largest]
        while tried[-1].batch_size > 1 and (next_plan := tried[-1].smaller()):
            tried.append(next_plan)
        said = f": {refused.text}" if refused.text else ""
        raise UserError(
            f"out of HBM with a single trial at a time ({who(refused.ranks)}); tried were "
            f"{', '.join(str(each.batch_size) for each in tried)} trials a core{said}",
            f"step {step + 1}, bucket of {input_bins} bins",
            f"{_PLAN}, and make the model smaller, or share its state among the cores with optimizer.sharded=true; "
            "fewer cores do not give a core more memory",
        )
    return Fallback(step, input_bins, plan, smaller, refused)


def memory_keys(config: Config) -> str:
    """What of a configuration decides how much fits a core, and may change in a run: a limit holds as long as this."""
    train = config.train
    values = (train.batch_size, train.global_batch, train.accumulation, config.validation.batch_size)
    spread = (config.optimizer.sharded, config.data.prefetch_mb)
    return json.dumps([*values, *spread, config.model.options], sort_keys=True, default=str)


def limits_in_words(trials: int | None, decoded_trials: int | None) -> str:
    """What a resumed run does not try again, and what makes it; "" where it tries everything.

    Args:
        trials: of a micro-step that fitted, after more did not; None where nothing was refused.
        decoded_trials: the same of decoding.
    """
    limits = [f"{trials} trials a core"] * bool(trials) + [f"{decoded_trials} in decoding"] * bool(decoded_trials)
    if not limits:
        return ""
    return f"more than {', '.join(limits)} did not fit before; it is tried again after a change of any of {_LIFTING}"


def way_out(plan: BatchPlan | None) -> str:
    """What to do where a rank ran out of HBM and the others could not be told in time.

    Args:
        plan: the batch at that moment; None where there is none yet.
    """
    if plan is None:
        return f"share the state among the cores with optimizer.sharded=true; {_PLAN}"
    smaller = plan.smaller()
    keys = smaller.as_keys() if smaller else ""
    return f"go on from the last checkpoint with --resume {keys}; {_PLAN}" if keys else _PLAN


def way_out_of_update(can_share: bool) -> str:
    """The same where the update itself was refused: it takes what parameters, gradients and their state take.

    Args:
        can_share: whether there are several cores, and each holds the whole state.
    """
    share = "share the state among the cores with optimizer.sharded=true, or " if can_share else ""
    return f"{share}train fewer parameters: a smaller model, or some of them frozen; {_PLAN}"


def way_out_of_decoding(option: str, trials: int, group_size: int) -> str:
    """The same where decoding was refused.

    Args:
        option: what takes a number of trials, up to where the number follows.
        trials: that are decoded at once.
        group_size: of which the option takes multiples only.
    """
    smaller = trials // 2 // group_size * group_size
    return f"give {option}{smaller}; {_PLAN}" if smaller else f"{_PLAN}, and make the model smaller"


@contextmanager
def explaining(
    fix: Callable[[], str], doing: Callable[[], str], cause: str = "at a place where ranks cannot fall back"
) -> Iterator[None]:
    """Around everything that a rank does: what ran out, where nothing falls back, is told as an error to mend.

    Args:
        fix: what helps where it was HBM.
        doing: what was being done at that moment.
        cause: why nothing falls back.
    """
    try:
        yield
    except Exception as error:
        memory = exhausted(error)
        if memory is None:
            raise
        if memory is not Memory.HBM:
            raise not_cured(error, memory, doing()) from error
        raise UserError(f"out of HBM, {cause}: {in_short(error)}", doing(), fix()) from error


def _a_core(plan: BatchPlan) -> str:
    return "1 trial a core" if plan.batch_size == 1 else f"{plan.batch_size} trials a core"
