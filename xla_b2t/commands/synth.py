"""`xla_b2t synth`: settings in, a simulated participant in the public layout out."""

import argparse

SUMMARY = "simulate a participant in the layout of the public brain-to-text data"
EXAMPLE = "xla_b2t synth demo/trials --sessions 4 --trials 100 --features 128 --seed 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; each default is the one of `SynthSettings`."""
    parser.add_argument("out", help="folder to write; it must be empty or hold a simulation")
    parser.add_argument("--sessions", type=int, default=4, help="days of recording (default 4)")
    parser.add_argument("--trials", type=int, default=100, help="training sentences a session (default 100)")
    parser.add_argument(
        "--held-out-share", type=float, default=0.18, metavar="X",
        help="sentences of val, and of test, for each training sentence (default 0.18, as in the public data)",
    )  # fmt: skip
    parser.add_argument(
        "--train-only-sessions",
        type=int,
        default=0,
        metavar="N",
        help="first sessions without val and test (default 0)",
    )
    parser.add_argument("--features", type=int, default=128, help="a multiple of 8 (default 128; the public data: 512)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument(
        "--bins-per-phoneme", type=float, default=7.0, metavar="X",
        help="mean length of a phoneme in bins of 20 ms (default 7; the public data: about 28)",
    )  # fmt: skip
    parser.add_argument(
        "--silence-bins", type=float, default=12.0, metavar="X", help="mean silence at either end, bins (default 12)"
    )
    parser.add_argument("--signal", type=float, default=0.4, metavar="X", help="tuning against noise (default 0.4)")
    parser.add_argument(
        "--drift", type=float, default=0.25, metavar="X", help="change of the tuning in a week, 0 to 1 (default 0.25)"
    )
    parser.add_argument(
        "--sentences", default="", metavar="FILE", help="own sentences, one a line (default: an English phrase grammar)"
    )
    parser.add_argument("--gzip", action="store_true", help="compress the features")
    parser.add_argument("--overwrite", action="store_true", help="replace the simulation that is there")


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints what was written."""
    import json
    import time
    from dataclasses import asdict, fields

    from xla_b2t.commands.progress import shown_progress
    from xla_b2t.data.synth import SynthSettings, synthesize

    settings = SynthSettings(**{field.name: getattr(args, field.name) for field in fields(SynthSettings)})
    started = time.monotonic()
    with shown_progress() as progress:
        report = synthesize(args.out, settings, progress)
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps({**asdict(report), "seconds": round(seconds, 2)}))
        return 0
    _print(report, settings.features, seconds)
    return 0


def _print(report, features: int, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="simulated participant", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("folder", report.folder)
    table.add_row("sessions", f"{len(report.sessions)}, {report.sessions[0]} to {report.sessions[-1]}")
    table.add_row("trials", ", ".join(f"{split} {count:,}" for split, count in report.trials.items()))
    table.add_row("features", f"{features}, z-scored by block")
    table.add_row("bins a trial", f"{report.mean_bins:.0f} on average, {report.longest_bins} at most (20 ms each)")
    table.add_row("phonemes a trial", f"{report.mean_phonemes:.1f} on average, silences counted")
    table.add_row("words", f"{report.distinct_words:,} distinct; no sentence twice")
    table.add_row("size", f"{report.bytes / 1e6:,.1f} MB in {seconds:.1f} s")
    Console(highlight=False).print(table)
