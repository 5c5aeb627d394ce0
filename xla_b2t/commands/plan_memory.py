"""`xla_b2t plan-memory`: HBM and time of every bucket on a TPU, and the largest batch, without a TPU."""

import argparse
import json
from dataclasses import asdict

from xla_b2t.commands.run_options import NamedRun, add_run_options, named_run
from xla_b2t.errors import UserError

SUMMARY = "plan the memory and the time of a run on a TPU that is not here"
EXAMPLE = "xla_b2t plan-memory --config configs/gru_baseline.toml --set data.dir=groups --topology v5e-8"

_TOPOLOGY = "v5e-8"
_MARGIN = 0.05
_MOST = 10**6  # features, days or bins; what is more was not meant
_OF_FREE_MEMORY = ("precision", "optimizer", "checkpointing", "max_batch")
_ALL_FEATURES, _ALL_DAYS = 512, 45  # of the public data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_run_options(parser)
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help=f"the slice by Google's name, all of its cores unless --cores is 1 (default: {_TOPOLOGY})",
    )
    parser.add_argument(
        "--batch-size",
        choices=("auto",),
        help="auto: have the compiler find the largest batch of a core that every bucket takes, and plan for it",
    )
    parser.add_argument(
        "--margin",
        type=float,
        help=f"share of the memory that is left free at least (default: {_MARGIN} on a TPU)",
    )
    parser.add_argument("--no-compiler", action="store_true", help="arithmetic alone: seconds instead of minutes")
    parser.add_argument("--no-cache", action="store_true", help="compile again what was compiled before")
    ahead = parser.add_argument_group("before there are data")
    ahead.add_argument("--bins", metavar="N,N,...", help="buckets of these lengths in place of those of the data")
    ahead.add_argument("--features", type=int, default=_ALL_FEATURES, metavar="N", help="default: %(default)s")
    ahead.add_argument("--days", type=int, default=_ALL_DAYS, metavar="N", help="default: %(default)s")
    other = parser.add_argument_group("for a device that is known by its free memory alone, by rules of thumb")
    other.add_argument(
        "--free-memory", metavar="SIZE", help="what is free on it, such as 3669MB; no TPU is asked about"
    )
    other.add_argument("--precision", help="float32, bfloat16, float16, int8 (default: bfloat16)")
    other.add_argument("--optimizer", help="sgd, momentum, adam, adamw (default: adamw)")
    other.add_argument("--checkpointing", action="store_true", help="activations are worked out again for the gradient")
    other.add_argument("--max-batch", type=int, metavar="N", help="never more trials than these")


def run(args: argparse.Namespace) -> int:
    """Plans, and prints the plan; exit code 2 where a bucket does not fit."""
    named = named_run(args)
    _refuse_mixture(args)
    if args.free_memory is not None:
        return _plan_by_free_memory(args, named)
    if args.bins is None:
        named.make_demo_data()
    from xla_b2t.commands.plan_tables import print_plan
    from xla_b2t.commands.progress import shown_progress
    from xla_b2t.memory.plan import make_plan

    task = _task(args, named)
    with shown_progress() as tell:
        plan = make_plan(task, tell)
    if args.json:
        print(json.dumps(asdict(plan)))
    else:
        print_plan(plan, named.config, is_installed=task.asks_compiler or args.no_compiler)
    return 0 if plan.fits else 2


def _task(args: argparse.Namespace, named: NamedRun):
    from xla_b2t import config as configuration
    from xla_b2t.memory.plan import Task
    from xla_b2t.xla import tpu_compiler
    from xla_b2t.xla.slices import slice_named
    from xla_b2t.xla.verdict_cache import default_folder

    goal = slice_named(_TOPOLOGY if args.topology is None else args.topology)
    margin = _MARGIN if args.margin is None else args.margin
    if not 0 <= margin < 1:
        raise UserError(f"the margin is {margin}, expected a share from 0 to below 1", "--margin", "write 5 % as 0.05")
    asks_compiler = not args.no_compiler and tpu_compiler.is_installed()
    if args.batch_size and args.no_compiler:
        raise UserError(
            "--batch-size auto asks the compiler, --no-compiler forbids it", "the command line", "give one of them"
        )
    return Task(
        config=configuration.dumps(named.config),
        topology=goal.name,
        num_ranks=_ranks(args.cores, goal.name, goal.cores),
        margin=margin,
        asks_compiler=asks_compiler or bool(args.batch_size),  # which then says what is missing
        searches=bool(args.batch_size),
        input_bins=_bins(args.bins),
        num_features=args.features,
        num_days=args.days,
        cache="" if args.no_cache else str(default_folder()),
    )


def _ranks(asked: int | None, topology: str, cores: int) -> int:
    """What `run.cores` says is of the machine that trains, not of a slice that is planned for."""
    if asked not in (None, 0, 1, cores):
        fix = f"leave --cores out for all {cores}" + (", or give 1" if cores > 1 else "")
        raise UserError(
            f"{asked} cores were asked for; {topology} has {cores}, and torch_xla starts one or all of them",
            "--cores",
            f"{fix} (fewer cores never give a core more memory)",
        )
    return asked or cores


def _refuse_mixture(args: argparse.Namespace) -> None:
    """An option of the one way to plan would be ignored by the other."""
    is_by_free_memory = args.free_memory is not None
    foreign = ("topology", "batch_size", "no_compiler", "no_cache", "cores") if is_by_free_memory else _OF_FREE_MEMORY
    given = [f"--{name.replace('_', '-')}" for name in foreign if getattr(args, name)]
    if given:
        way = "plans by rules of thumb, without a TPU" if is_by_free_memory else "is not given"
        raise UserError(
            f"{', '.join(given)} would be ignored: --free-memory {way}",
            "the command line",
            "leave one of them out" if is_by_free_memory else "add --free-memory, or leave it out",
        )
    for flag, value in (("--features", args.features), ("--days", args.days)):
        if not 1 <= value <= _MOST:
            raise UserError(f"{flag} is {value}, expected 1 to {_MOST:,}", flag, "give what the data will have")


def _bins(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= _MOST for word in words):
        what = f"{text!r} is no list of numbers of bins, each from 1 to {_MOST:,}"
        raise UserError(what, "--bins", "write --bins 400,800,1600")
    return tuple(map(int, words))


def _plan_by_free_memory(args: argparse.Namespace, named: NamedRun) -> int:
    """The rules for a device of which nothing else is known, for the configured model on its longest trial."""
    from xla_b2t.commands.plan_tables import print_answer
    from xla_b2t.memory.free_memory import largest_batch, num_bytes
    from xla_b2t.memory.subject import subject_by_hand, subject_of
    from xla_b2t.models.build import build_without_weights

    bins = _bins(args.bins)
    if not bins:
        named.make_demo_data()
    subject = subject_by_hand(bins, args.features, args.days) if bins else subject_of(named.config)
    model = build_without_weights(named.config.model, subject.sizes)
    longest = max(bucket.input_bins for bucket in subject.buckets)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    answer = largest_batch(
        free_bytes=num_bytes(args.free_memory),
        base_bytes=num_parameters,
        num_steps=longest,
        num_inputs=subject.sizes.num_features,
        precision=args.precision or "bfloat16",
        optimizer=args.optimizer or "adamw",
        checkpointing=args.checkpointing,
        margin=args.margin or 0.0,  # a precision has a margin of its own, which is the least
        max_batch=args.max_batch,
    )
    if args.json:
        said = {**asdict(answer), "fixed_bytes": answer.fixed_bytes, "required_bytes": answer.required_bytes}
        print(json.dumps({"num_parameters": num_parameters, "input_bins": longest, **said}))
    else:
        print_answer(answer, num_parameters, longest, subject.sizes.num_features)
    return 0
