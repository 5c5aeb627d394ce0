"""`xla_b2t evaluate`: a checkpoint and groups in, the phoneme error rate and every decoded sequence out."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xla_b2t.errors import UserError

if TYPE_CHECKING:
    from xla_b2t.config import DataConfig
    from xla_b2t.training.checkpoint import Checkpoint
    from xla_b2t.xla.world import World

SUMMARY = "decode a split with a checkpoint: phoneme error rate per day and overall, and the sequences"
EXAMPLE = "xla_b2t evaluate runs/demo --split test --output phonemes.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "run_dir", metavar="RUN", help="run directory, as train wrote it, or a model folder of the published baseline"
    )
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), latest, or a file of either kind"
    )
    parser.add_argument("--split", default="val", help="train, val (default) or test")
    parser.add_argument("--head", default="", metavar="NAME", help="decode with this auxiliary head of the model")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="groups to decode; default: what the run was given",
    )
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="ranks (default 1); they change no number")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="trials a core and step (default 64), whole groups"
    )
    parser.add_argument("--allow-recompile", action="store_true", help="go on after a recompile or a host fallback")
    parser.add_argument("--no-kernel", action="store_true", help="run recurrent layers as loops on a TPU too")
    parser.add_argument("--output", metavar="FILE", help="write the decoded sequences here, a JSON object a line")


@dataclass(frozen=True)
class EvaluationJob:
    """What a rank is to decode, how, and the folder for its predictions."""

    checkpoint: str
    data: "DataConfig"
    split: str
    output_dir: str
    batch_size: int
    allow_recompile: bool
    head: str
    no_kernel: bool


def run(args: argparse.Namespace) -> int:
    """Decodes; prints a table, or JSON with --json."""
    from xla_b2t.xla.machine import find_machine

    if args.batch_size < 1:
        raise UserError(f"{args.batch_size} trials a core were asked for", "--batch-size", "give 1 or more")
    machine = find_machine()
    from xla_b2t.training.weights import find_checkpoint, read_checkpoint
    from xla_b2t.xla import spawn

    spawn.prepare(machine, "xla_b2t.evaluation.decode")
    run_dir = Path(args.run_dir)
    path = find_checkpoint(run_dir, args.checkpoint)
    checkpoint = read_checkpoint(path)
    from xla_b2t import config as configuration

    if not args.data and not checkpoint.conversion:
        fix = "give the folder that prebatch wrote with --data"
        raise UserError("a checkpoint of the published baseline does not name any groups", str(path), fix)
    data = configuration.loads(checkpoint.config, str(path)).data
    if args.data:
        data = configuration.DataConfig(dir=args.data, features=data.features)
    _check_data(data, args.split, checkpoint, path)

    with tempfile.TemporaryDirectory(prefix="xla_b2t-") as output_dir:
        job = EvaluationJob(
            checkpoint=str(path),
            data=data,
            split=args.split,
            output_dir=output_dir,
            batch_size=args.batch_size,
            allow_recompile=args.allow_recompile,
            head=args.head,
            no_kernel=args.no_kernel,
        )
        try:
            spawn.run(evaluate_rank, (job,), machine, machine.ranks(args.cores), run_dir / "crash-evaluate")
        except spawn.Interrupted as interrupted:
            print("interrupted, all ranks are gone", file=sys.stderr)
            return 128 + interrupted.args[0]
        except spawn.RankError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        parts = sorted(Path(output_dir).glob("rank-*.jsonl"))
        predictions = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    predictions.sort(key=lambda prediction: prediction["trial"])
    if args.output:
        _write(Path(args.output), predictions)
    result = {
        "checkpoint": str(path),
        "step": checkpoint.step,
        "split": args.split,
        "head": args.head,
        **_score(predictions),
    }
    if args.json:
        print(json.dumps(result))
    else:
        from xla_b2t.commands.tables import print_evaluation

        print_evaluation(result, predictions, args.output)
    return 0


def evaluate_rank(world: "World", job: EvaluationJob) -> None:
    """Decodes this rank's share and writes it to `rank-N.jsonl`."""
    from xla_b2t import config as configuration
    from xla_b2t.data.group_reader import GroupReader
    from xla_b2t.data.phonemes import PHONEMES
    from xla_b2t.data.selection import open_selected
    from xla_b2t.evaluation.decode import DecodingFallback, SplitDecoder
    from xla_b2t.models.build import build_model
    from xla_b2t.models.policy import DTYPES
    from xla_b2t.models.protocol import Sizes
    from xla_b2t.training.fallback import explaining, way_out_of_decoding
    from xla_b2t.training.kernel_check import check_kernels, turn_off_kernels
    from xla_b2t.training.step import place_weights
    from xla_b2t.training.weights import for_sessions, read_checkpoint
    from xla_b2t.xla.compile_guard import CompileGuard

    group_set = open_selected(job.data)
    checkpoint = for_sessions(read_checkpoint(job.checkpoint), job.checkpoint, group_set.sessions, job.data.dir)
    config = configuration.loads(checkpoint.config, job.checkpoint)
    model = build_model(config.model, Sizes(checkpoint.num_features, len(checkpoint.sessions), checkpoint.num_classes))
    groups_per_core = max(1, job.batch_size // group_set.group_size)
    if job.no_kernel:
        turn_off_kernels(model)
    dtype = DTYPES[config.model.dtype]
    check_kernels(model, dtype, groups_per_core * group_set.group_size, trains=False)

    def told(fallback: DecodingFallback) -> None:
        check_kernels(model, dtype, fallback.after, trains=False)
        if world.rank == 0:
            said = f"\n  {fallback.text}" if fallback.text else ""
            print(fallback.in_words() + said, file=sys.stderr, flush=True)

    place_weights(model, config.model, checkpoint.state)
    guard = CompileGuard(job.allow_recompile)
    decoder = SplitDecoder(
        model,
        checkpoint.num_classes,
        config,
        world,
        guard,
        groups_per_core,
        job.head,
        on_fallback=told,
    )
    with (
        explaining(
            lambda: way_out_of_decoding("--batch-size ", decoder.batch_size, group_set.group_size),
            lambda: f"decoding {job.split}",
        ),
        GroupReader(group_set, job.split) as reader,
        open(Path(job.output_dir) / f"rank-{world.rank}.jsonl", "w", encoding="utf-8") as file,
    ):
        for prediction in decoder.decode(reader):
            values = asdict(prediction)
            values["phonemes"] = [PHONEMES[index] for index in prediction.decoded]
            file.write(json.dumps(values) + "\n")


def _check_data(data: "DataConfig", split: str, checkpoint: "Checkpoint", path: Path) -> None:
    """The groups are of the participant, and of the split, that the checkpoint can decode."""
    from xla_b2t import config as configuration
    from xla_b2t.data.selection import open_selected
    from xla_b2t.training.weights import check_use

    group_set = open_selected(data)
    if split not in group_set.splits:
        here = ", ".join(group_set.splits)
        raise UserError(f"there is no split {split!r}; it has {here}", data.dir, f"use --split with one of {here}")
    if not len(group_set.splits[split].bucket_G) and (data.sessions or data.blocks):
        what = f"no trial of {split} is of the sessions and blocks that the run was given"
        raise UserError(what, data.dir, f"use another --split, or decode all of it with --data {data.dir}")
    check_use(checkpoint, str(path), configuration.loads(checkpoint.config, str(path)).model, group_set)


def _score(predictions: list[dict]) -> dict:
    from xla_b2t.evaluation.per import score, total

    labelled = [prediction for prediction in predictions if prediction["reference"] is not None]
    by_day = score((entry["session"], entry["reference"], entry["decoded"]) for entry in labelled)
    return {
        "trials": len(predictions),
        "per": total(by_day).per if labelled else None,
        "errors": total(by_day).errors if labelled else None,
        "phonemes": total(by_day).phonemes if labelled else None,
        "per_by_day": {session: day.per for session, day in by_day.items()},
        "loss": sum(entry["loss"] for entry in labelled) / len(labelled) if labelled else None,
    }


def _write(path: Path, predictions: list[dict]) -> None:
    from xla_b2t.files import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text("".join(json.dumps(prediction) + "\n" for prediction in predictions), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the sequences cannot be written: {error.strerror}", str(path), "give another --output"
        ) from None
