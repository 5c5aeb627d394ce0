"""`xla_b2t export`: a checkpoint in, its weights in the layout of another program out."""

import argparse

from xla_b2t.errors import UserError

SUMMARY = "write a checkpoint for another program: nejm is the published baseline, its evaluation and language model"
EXAMPLE = "xla_b2t export runs/first --format nejm --out exported"

FORMATS = {"nejm": "xla_b2t.training.nejm"}
"""Name of a layout -> its module: `export(checkpoint, out, where, overwrite)` writes it and returns the files, and
`NEXT_STEP` says in words what to do with `{out}`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("run_dir", metavar="RUN", help="run directory, as train wrote it")
    parser.add_argument("--format", required=True, choices=tuple(FORMATS), help="layout to write")
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="folder to write; it is made where it is missing"
    )
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), latest, or a checkpoint file"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier export left there")


def run(args: argparse.Namespace) -> int:
    """Writes the files, and prints their names."""
    import importlib
    import json
    import os
    from pathlib import Path

    os.environ.setdefault("PJRT_DEVICE", "CPU")  # no core is needed; torch_xla warns of one that it has to choose
    from xla_b2t.training.weights import find_checkpoint, read_checkpoint

    if (Path(args.out) / "config.toml").exists():
        raise UserError("this directory holds a run", f"--out {args.out}", "give --out a folder of its own")
    path = find_checkpoint(args.run_dir, args.checkpoint)
    checkpoint = read_checkpoint(path)
    layout = importlib.import_module(FORMATS[args.format])
    files = layout.export(checkpoint, Path(args.out), str(path), args.overwrite)
    result = {
        "checkpoint": str(path),
        "step": checkpoint.step,
        "val_per": checkpoint.val_per,
        "format": args.format,
        "files": [str(file) for file in files],
    }
    if args.json:
        print(json.dumps(result))
    else:
        from xla_b2t.commands.tables import print_export

        print_export(result, layout.NEXT_STEP.format(out=args.out))
    return 0
