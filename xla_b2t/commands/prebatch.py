"""`xla_b2t prebatch`: a folder of sessions in, a folder of groups out, and a report of what was kept and refused."""

import argparse
from collections.abc import Sequence

SUMMARY = "convert trials to padded bfloat16 groups, and say which trials cannot be used and why"
EXAMPLE = "xla_b2t prebatch hdf5_data_final groups --buckets 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; each default is the one of `PrebatchSettings`."""
    parser.add_argument(
        "source", nargs="?", help="folder of sessions, each with data_train.hdf5, data_val.hdf5, data_test.hdf5"
    )
    parser.add_argument("out", nargs="?", help="folder to write the groups to")
    parser.add_argument(
        "--verify", metavar="DIR", help="convert nothing, but check a folder of groups: every file, table and checksum"
    )
    parser.add_argument("--group-size", type=int, default=8, metavar="N", help="trials a group (default 8)")
    parser.add_argument("--buckets", type=int, default=8, metavar="N", help="the most lengths to pad to (default 8)")
    parser.add_argument(
        "--patch-bins", type=int, default=14, metavar="N",
        help="bins of the decoder's patch (default 14); a trial must have one patch",
    )  # fmt: skip
    parser.add_argument(
        "--patch-stride", type=int, default=4, metavar="N",
        help="bins between patches (default 4); a label must fit the patches of its trial",
    )  # fmt: skip
    parser.add_argument(
        "--features", type=int, default=0, metavar="N", help="features a trial must have (default: what most have)"
    )
    parser.add_argument(
        "--passes", type=int, default=1, metavar="N",
        help="group the training trials so many times, each time shuffled otherwise (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--file-mb", type=int, default=512, metavar="MB", help="the most megabytes of a file (default 512)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the shuffle among groups of a day and bucket (default 0)"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default 0: one for each core it may use)"
    )
    parser.add_argument("--strict", action="store_true", help="a trial that cannot be used is an error")
    parser.add_argument("--overwrite", action="store_true", help="replace the groups that are there")


def run(args: argparse.Namespace) -> int:
    """Converts, and prints the report; or verifies, and prints what is wrong."""
    import os

    from xla_b2t.errors import UserError

    if args.workers < 0:
        raise UserError(f"--workers is {args.workers}, expected at least 0", "--workers", "give 0 or more")
    workers = args.workers or len(os.sched_getaffinity(0))
    if args.verify is not None:
        if args.source is not None:
            what = "a folder to verify and one to convert are both given"
            raise UserError(what, f"--verify {args.verify}", "give one of them")
        return _verify(args, workers)
    if args.out is None:
        raise UserError("there is no folder to write to", "prebatch", "give a folder of sessions and one to write to")
    return _convert(args, workers)


def _convert(args: argparse.Namespace, workers: int) -> int:
    import json
    import time
    from dataclasses import asdict

    from xla_b2t.commands.progress import shown_progress
    from xla_b2t.data.prebatch import PrebatchSettings, prebatch

    settings = PrebatchSettings(
        group_size=args.group_size,
        num_buckets=args.buckets,
        patch_bins=args.patch_bins,
        patch_stride=args.patch_stride,
        num_features=args.features,
        num_passes=args.passes,
        file_mb=args.file_mb,
        seed=args.seed,
        strict=args.strict,
        overwrite=args.overwrite,
    )
    started = time.monotonic()
    with shown_progress() as progress:
        report = prebatch(args.source, args.out, settings, progress, workers)
    seconds = time.monotonic() - started
    if args.json:
        content = {**asdict(report), "refused_by_reason": report.refused_by_reason, "seconds": round(seconds, 2)}
        print(json.dumps(content))
        return 0
    _print(report, seconds)
    return 0


def _verify(args: argparse.Namespace, workers: int) -> int:
    import json
    from dataclasses import asdict

    from xla_b2t.commands.progress import shown_progress
    from xla_b2t.data.verification import verify

    with shown_progress() as progress:
        found = verify(args.verify, workers, progress)
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        for number, fault in enumerate(found.faults, 1):
            print(f"({number}) {fault.what}\n    where: {fault.where}\n    fix:   {fault.fix}")
        looked = f"{found.groups:,} groups in {found.files} files, {found.bytes / 1e6:,.1f} MB"
        print(f"{found.folder}: {f'{len(found.faults)} faults' if found.faults else 'all is well'}; {looked}")
    return 2 if found.faults else 0


def _compared(shares: Sequence[float], num_buckets: int) -> str:
    """What other numbers of buckets would do, and why not more of them."""
    counts = [count for count in (1, 2, 4, 6, 8, 12, 16) if count <= len(shares)]
    said = ", ".join(f"{count}: {shares[count - 1]:.1%}" for count in counts)
    text = f"real bins of single trials in so many buckets, {said}"
    if num_buckets < len(shares):
        gain = shares[num_buckets] - shares[num_buckets - 1]
        text += f"; one more than {num_buckets} saves {gain:.1%} of the bins, and costs two compiles"
    return text + " (a TPU compiles training and decoding for each, about half a minute)"


def _print(report, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)  # names are the source's
    splits = Table(title=f"{report.folder}: {report.num_features} features, {seconds:.1f} s", title_justify="left")
    for heading in ("split", "trials in", "kept", "refused", "groups", "real bins", "MB"):
        splits.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in report.splits.items():
        splits.add_row(
            name if split.labelled else f"{name} (no labels)",
            f"{split.trials_in:,}", f"{split.trials_kept:,}", f"{split.trials_in - split.trials_kept:,}",
            f"{split.groups:,}", f"{split.padding_efficiency:.1%}", f"{split.bytes / 1e6:,.1f}",
        )  # fmt: skip
    console.print(splits)
    buckets = Table(title="buckets", title_justify="left")
    for heading in ("input bins", "label slots", *(f"{name} groups" for name in report.splits)):
        buckets.add_column(heading, justify="right")
    for number, bucket in enumerate(report.buckets):
        counts = (f"{split.groups_per_bucket[number]:,}" for split in report.splits.values())
        buckets.add_row(f"{bucket.input_bins:,}", str(bucket.label_slots), *counts)
    console.print(buckets)
    console.print(_compared(report.real_shares, len(report.buckets)))
    if report.refused:
        refused = Table(title="refused", title_justify="left")
        for heading in ("reason", "trials", "the first"):
            refused.add_column(heading, overflow="fold", justify="right" if heading == "trials" else "left")
        for reason, count in report.refused_by_reason.items():
            first = next(refusal for refusal in report.refused if refusal.reason == reason)
            refused.add_row(reason, f"{count:,}", f"{first.trial_id}: {first.detail}")
        console.print(refused)
        console.print(f"every refused trial is listed in {report.folder}/report.json")
    else:
        console.print("refused: none")
    for note in report.notes:
        console.print(note)
    for name, split in report.splits.items():
        if split.labels_ignored:
            console.print(f"{name}: {split.labels_ignored} trials have labels, but not all; they are left out")
    if report.ignored:
        console.print(f"passed over in the source: {', '.join(report.ignored)}")
