"""`xla_b2t audit-dtypes`: the preflight alone. Every dtype and shape of a run, without data, weights or a TPU."""

import argparse
import json

from xla_b2t.commands.run_options import add_run_options, named_run

SUMMARY = "prove every dtype and shape of a run before its first step"
EXAMPLE = "xla_b2t audit-dtypes --config configs/gru_baseline.toml --set data.dir=groups --cores 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Looks, and prints what was found: a line for nothing, else a block for each finding and exit code 2."""
    named = named_run(args)
    named.make_demo_data()

    import msgspec

    from xla_b2t.commands.progress import waiting
    from xla_b2t.xla.machine import find_machine

    num_ranks = find_machine().ranks(named.config.run.cores)
    from xla_b2t.audit.preflight import preflight

    with waiting("preflight: every dtype, shape and number"):
        report = preflight(named.config, num_ranks, given=named.given)
    if args.json:
        print(json.dumps({"clean": not report.findings, **msgspec.to_builtins(report)}))
    else:
        from xla_b2t.commands.tables import print_report

        print_report(report)
    return 2 if report.findings else 0
