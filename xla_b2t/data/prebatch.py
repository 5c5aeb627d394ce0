"""From trial files to groups: check every trial, plan the groups, write them.

In: a folder in the public layout. Out: a folder of groups with its manifest, and a report of what was kept and refused.
Shapes and labels are looked at first (`scan`), features are read once, when they are written (`padding`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xla_b2t.data.conversion import (
    describe_source,
    differences,
    finished_parts,
    in_words,
    prepare_folder,
    read_description,
    refuse_foreign,
)
from xla_b2t.data.group_format import FORMAT, FORMAT_VERSION, INDEX, MANIFEST, SOURCE, part_name
from xla_b2t.data.group_writer import Part, write_index, write_json, write_part
from xla_b2t.data.grouping import Plan, PlannedGroup, cut_into_parts, plan_groups
from xla_b2t.data.groups import Bucket, find_files, read_manifest
from xla_b2t.data.padding import padded_groups
from xla_b2t.data.phonemes import NUM_CLASSES
from xla_b2t.data.prebatch_report import PrebatchReport, as_manifest, of_manifest, report_split
from xla_b2t.data.scan import Needs, Progress, Scan, scan
from xla_b2t.data.trials import SPLITS, Refusal, SessionFile, Source, find_sessions
from xla_b2t.data.workers import At, Workers
from xla_b2t.errors import UserError

_OVERHEAD_BYTES = 1 << 14
"""What a group takes beside its features, generously."""


@dataclass(frozen=True)
class PrebatchSettings:
    """How trials become groups.

    Attributes:
        group_size: trials a group.
        num_buckets: the most buckets, and so the most compiles of a step.
        patch_bins: bins of the decoder's patch; a shorter trial is refused.
        patch_stride: bins between patches; a label that needs more steps than a trial has patches is refused.
        num_features: what every trial must have; 0 takes what most have.
        num_passes: how many times the training trials are grouped, each time shuffled otherwise.
        file_mb: the most megabytes of a file.
        seed: of the shuffle of trials among the groups of a day and bucket.
        strict: a trial that cannot be used is an error.
        overwrite: replace the groups that are in the output folder.
    """

    group_size: int = 8
    num_buckets: int = 8
    patch_bins: int = 14
    patch_stride: int = 4
    num_features: int = 0
    num_passes: int = 1
    file_mb: int = 512
    seed: int = 0
    strict: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, value in self.lasting().items():
            least = 0 if name in ("num_features", "seed") else 1
            if value < least:
                flag = "--" + name.removeprefix("num_").replace("_", "-")
                raise UserError(f"{name} is {value}, expected at least {least}", flag, f"give {least} or more")

    def lasting(self) -> dict[str, int]:
        """The settings that leave a mark on the groups."""
        return {name: value for name, value in asdict(self).items() if name not in ("strict", "overwrite")}


@dataclass(frozen=True)
class PartTask:
    """One file to write: all that it takes to do so in any process. `bytes` is more than it will take."""

    path: str
    groups: tuple[PlannedGroup, ...]
    bytes: int
    conversion: str
    files: tuple[SessionFile, ...]
    buckets: tuple[Bucket, ...]
    group_size: int


def prebatch(
    source_dir: str | Path,
    out_dir: str | Path,
    settings: PrebatchSettings,
    progress: Progress = lambda *_: None,
    num_workers: int = 0,
) -> PrebatchReport:
    """Converts a folder of sessions to a folder of groups. The same source and settings give the same bytes.

    A run that was interrupted is gone on with, when source and settings are the same. Groups that are up to date are
    left alone.

    Args:
        source_dir: the sessions.
        out_dir: where the groups shall be.
        settings: how trials become groups.
        progress: called as things are done.
        num_workers: processes; 0 does everything in this one. They make no difference to what is written.

    Raises:
        UserError: nothing to read, a split with nothing that can be used, a refused trial under `strict`, an output
            folder that is in use, too little room on the disk, a source that changes meanwhile, a worker that dies.
    """
    source, out = find_sessions(source_dir), Path(out_dir)
    refuse_foreign(out)
    made_from = describe_source(source, settings.lasting())
    changes = differences(read_description(out), made_from)
    if (out / MANIFEST).exists() and not settings.overwrite and (changes or _is_whole(out)):
        return _up_to_date(source, out, changes, settings.strict)
    with Workers(num_workers) as workers:
        needs = Needs(settings.patch_bins, settings.patch_stride, settings.num_features)
        scanned = scan(source, needs, workers, progress)
        _refuse_unusable(source, scanned.kept, scanned.refused, settings.strict)
        plan = plan_groups(scanned.kept, settings.group_size, settings.num_buckets, settings.seed, settings.num_passes)
        conversion = _conversion_id(settings, plan)
        tasks = _cut_into_tasks(source, out, plan, scanned.num_features, settings, conversion)
        notes, done = _take_over(out, made_from, changes, tasks, settings)
        parts = _write_parts(source, tasks, done, settings, workers, progress)
    changed = differences(made_from, describe_source(source, settings.lasting()))
    if changed:
        fix = "let the source rest, and run xla_b2t prebatch again"
        raise UserError(f"the source changed meanwhile: {in_words(changed)}", source.folder, fix)
    report = _report(source, out, plan, scanned, parts, settings, notes)
    about = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "conversion": conversion,
        "settings": settings.lasting(),
        "num_classes": NUM_CLASSES,
        "group_size": settings.group_size,
        "patch_bins": settings.patch_bins,
        "patch_stride": settings.patch_stride,
        "index": write_index(out / INDEX, parts, conversion),
    }
    write_json(out / MANIFEST, as_manifest(report, about))
    return report


def _is_whole(out: Path) -> bool:
    """Whether a finished conversion still has all its files; if not, it is gone on with like an interrupted one."""
    try:
        return not any(find_files(out, read_manifest(out)))
    except (UserError, KeyError, TypeError, AttributeError):
        return False


def _up_to_date(source: Source, out: Path, changes: list[str], strict: bool) -> PrebatchReport:
    if changes:
        what = f"there are groups here already, and they are of something else: {in_words(changes)}"
        raise UserError(what, str(out), "add --overwrite, or give another folder")
    note = "up to date: nothing has changed, nothing was written; --overwrite would write all of it again"
    report = of_manifest(str(out), read_manifest(out), (note,))
    _refuse_unusable(source, dict.fromkeys(report.splits, True), report.refused, strict)
    return report


def _cut_into_tasks(
    source: Source, out: Path, plan: Plan, num_features: int, settings: PrebatchSettings, conversion: str
) -> dict[str, list[PartTask]]:
    group_bytes = [
        2 * settings.group_size * bucket.input_bins * num_features + _OVERHEAD_BYTES for bucket in plan.buckets
    ]
    return {
        split: [
            PartTask(
                path=str(out / part_name(split, number)),
                groups=part,
                bytes=sum(group_bytes[group.bucket] for group in part),
                conversion=conversion,
                files=source.files,
                buckets=plan.buckets,
                group_size=settings.group_size,
            )
            for number, part in enumerate(cut_into_parts(groups, group_bytes, settings.file_mb * 1_000_000))
        ]
        for split, groups in plan.groups.items()
    }


def _take_over(
    out: Path,
    made_from: dict[str, Any],
    changes: list[str],
    tasks: dict[str, list[PartTask]],
    settings: PrebatchSettings,
) -> tuple[tuple[str, ...], dict[str, Part]]:
    """Makes the folder ready; what an interrupted run of the same source and settings has finished stays."""
    files = [Path(task.path).name for of_split in tasks.values() for task in of_split]
    was_begun = any(out.glob("*.h5*")) if out.is_dir() else False
    done, notes = {}, ()
    if was_begun and not changes and not settings.overwrite:
        done = finished_parts(out, files, tasks[next(iter(tasks))][0].conversion)
        notes = (f"gone on with what was there: {len(done)} of {len(files)} files",)
    elif was_begun and not settings.overwrite:
        notes = (f"begun anew: {in_words(changes)}",)
    needed = sum(task.bytes for of_split in tasks.values() for task in of_split if Path(task.path).name not in done)
    prepare_folder(out, list(done), needed)
    try:
        write_json(out / SOURCE, made_from)
    except OSError as error:
        raise _unwritable(out / SOURCE, error) from error
    return notes, done


def _write_parts(
    source: Source,
    tasks: dict[str, list[PartTask]],
    done: dict[str, Part],
    settings: PrebatchSettings,
    workers: Workers,
    progress: Progress,
) -> dict[str, list[Part]]:
    ordered = [task for of_split in tasks.values() for task in of_split]
    to_write = [task for task in ordered if Path(task.path).name not in done]
    total = sum(len(group.trials) for task in to_write for group in task.groups)
    trials, read = 0, 0
    progress("write", 0, total)

    def at(path: str, num_bytes: int) -> None:
        nonlocal trials, read
        if num_bytes:
            trials, read = trials + 1, read + num_bytes
            progress("write", trials, total, read)

    for _, part in workers.run(write_task, to_write, at):
        if part.refused and settings.strict:
            _refuse_unusable(source, {}, part.refused, strict=True)
        done = {**done, part.file: part}
    return {split: [done[Path(task.path).name] for task in of_split] for split, of_split in tasks.items()}


def write_task(task: PartTask, at: At) -> Part:
    """Writes one file.

    Raises:
        UserError: it cannot be written, or a file of the source cannot be opened any more.
    """
    refused: list[Refusal] = []
    groups = padded_groups(task.files, task.buckets, task.groups, task.group_size, refused, at)
    try:
        return write_part(Path(task.path), groups, refused, task.group_size, task.conversion)
    except OSError as error:
        raise _unwritable(Path(task.path), error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"the groups cannot be written: {error}", str(path), "make room, or choose another folder")


def _report(
    source: Source,
    out: Path,
    plan: Plan,
    scanned: Scan,
    parts: dict[str, list[Part]],
    settings: PrebatchSettings,
    notes: tuple[str, ...],
) -> PrebatchReport:
    # Each pass meets a trial that cannot be used again; it is one refusal.
    late = {refusal.trial_id: refusal for of_split in parts.values() for part in of_split for refusal in part.refused}
    refused = sorted((*scanned.refused, *late.values()), key=_order_of_files)
    splits = {
        split: report_split(
            of_split,
            plan.buckets,
            settings.group_size,
            labelled=bool(scanned.kept[split][0].labels),
            refused=sum(refusal.split == split for refusal in refused),
            labels_ignored=scanned.labels_ignored if split == "test" else 0,
        )
        for split, of_split in parts.items()
    }
    kept = {split: report.trials_kept for split, report in splits.items()}
    _refuse_unusable(source, kept, refused, settings.strict)
    return PrebatchReport(
        str(out),
        scanned.num_features,
        source.sessions,
        plan.buckets,
        plan.real_shares,
        splits,
        tuple(refused),
        source.ignored,
        notes,
    )


def _order_of_files(refusal: Refusal) -> tuple[str, int, str]:
    session, split, name = refusal.trial_id.split("/", 2)
    return session, SPLITS.index(split), name


def _refuse_unusable(source: Source, kept: Mapping[str, Any], refused: Sequence[Refusal], strict: bool) -> None:
    def describe(refused: Sequence[Refusal]) -> str:
        return f"the first {refused[0].trial_id}: {refused[0].reason}, {refused[0].detail}"

    if strict and refused:
        count = f"{len(refused)} trials" if len(refused) > 1 else "1 trial"
        raise UserError(
            f"{count} cannot be used, {describe(refused)}",
            source.folder,
            "mend them, or leave --strict out to go on without them",
        )
    for split in SPLITS:
        of_split = [refusal for refusal in refused if refusal.split == split]
        if of_split and not kept.get(split):
            raise UserError(f"no trial of {split} can be used, {describe(of_split)}", source.folder, "mend the trials")
    if not kept:
        raise UserError("the session files hold no trial", source.folder, "give another folder, or run xla_b2t synth")


def _conversion_id(settings: PrebatchSettings, plan: Plan) -> str:
    """Tells the files of one conversion from those of another."""
    known = hashlib.sha256(json.dumps([FORMAT_VERSION, settings.lasting()]).encode())
    known.update(repr(plan.buckets).encode())
    for split, groups in plan.groups.items():
        for group in groups:
            known.update(repr((split, group.bucket, group.pass_number)).encode())
            for trial in group.trials:
                known.update(repr((trial.trial_id, trial.day, trial.block, trial.input_bins, trial.labels)).encode())
    return known.hexdigest()[:16]
