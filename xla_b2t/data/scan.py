"""The first pass of a conversion: every trial of a source is either kept, as a record, or refused with a reason.

In: the files of a source. Out: `Scan`. Features are not read: what is wrong with their values shows when they are
written (`padding`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from xla_b2t.data.grouping import TrialRecord
from xla_b2t.data.phonemes import required_steps
from xla_b2t.data.trials import SPLITS, Refusal, SessionFile, Source, Trial, read_trials
from xla_b2t.data.workers import At, Workers

Progress = Callable[..., None]
"""Called with what is being done, how many are done, how many there are, and where it is known, bytes done."""


@dataclass(frozen=True)
class Needs:
    """What a decoder needs of a trial: at least one patch, and as many steps as its label takes.

    `num_features` 0 expects what most trials have.
    """

    patch_bins: int
    patch_stride: int
    num_features: int


@dataclass(frozen=True)
class Scan:
    """What a source holds.

    Attributes:
        num_features: features of every kept trial; 0 when there is none.
        kept: the usable trials of every split that has any.
        refused: the others, in the order of the files.
        labels_ignored: test trials that do have labels, in a test split where not all have them.
    """

    num_features: int
    kept: dict[str, tuple[TrialRecord, ...]]
    refused: tuple[Refusal, ...]
    labels_ignored: int


@dataclass(frozen=True)
class ScanTask:
    """One file of a source: its place among them, its day, and what a decoder needs."""

    file: SessionFile
    number: int
    day: int
    needs: Needs


def scan(source: Source, needs: Needs, workers: Workers, progress: Progress) -> Scan:
    """Checks every trial of a source, but for its features.

    Raises:
        UserError: a file cannot be opened.
    """
    days = {session: day for day, session in enumerate(source.sessions)}
    tasks = [ScanTask(file, number, days[file.session], needs) for number, file in enumerate(source.files)]
    by_file: dict[int, list[TrialRecord | Refusal]] = {}
    progress("check", 0, len(tasks))
    for number, of_file in workers.run(scan_file, tasks, lambda *_: None):
        by_file[number] = of_file
        progress("check", len(by_file), len(tasks))
    found = [trial for number in range(len(tasks)) for trial in by_file[number]]
    counts = Counter(trial.num_features for trial in found if isinstance(trial, TrialRecord))
    expected = needs.num_features or (counts.most_common(1)[0][0] if counts else 0)
    found = [_refuse_other_width(trial, expected) for trial in found]
    kept = {}
    for split in SPLITS:
        trials = tuple(
            trial for trial in found if isinstance(trial, TrialRecord) and source.files[trial.file].split == split
        )
        if trials:
            kept[split] = trials
    labels_ignored = 0
    if len({bool(trial.labels) for trial in kept.get("test", ())}) > 1:
        # A rate over part of a split would be taken for the rate of the whole.
        labels_ignored = sum(bool(trial.labels) for trial in kept["test"])
        kept["test"] = tuple(trial.without_labels() for trial in kept["test"])
    refused = tuple(trial for trial in found if isinstance(trial, Refusal))
    return Scan(expected if kept else 0, kept, refused, labels_ignored)


def scan_file(task: ScanTask, at: At) -> list[TrialRecord | Refusal]:
    """Checks the trials of one file, against the layout and against what the decoder needs."""
    at(task.file.path, 0)
    return [
        trial if isinstance(trial, Refusal) else _record(trial, task.number, task.day, task.needs)
        for trial in read_trials(task.file)
    ]


def _record(trial: Trial, number: int, day: int, needs: Needs) -> TrialRecord | Refusal:
    num_bins = trial.num_bins
    if num_bins < needs.patch_bins:
        return Refusal(trial.trial_id, "shorter_than_patch", f"{num_bins} bins, a patch needs {needs.patch_bins}")
    steps = (num_bins - needs.patch_bins) // needs.patch_stride + 1
    labels = () if trial.labels_L is None else tuple(int(label) for label in trial.labels_L)
    needed = 0 if trial.labels_L is None else required_steps(trial.labels_L)
    if needed > steps:
        detail = (
            f"{len(labels)} phonemes with {needed - len(labels)} adjacent repeats need {needed} steps, "
            f"{num_bins} bins give {steps}"
        )
        return Refusal(trial.trial_id, "label_longer_than_steps", detail)
    return TrialRecord(trial.trial_id, number, day, trial.block, num_bins, trial.num_features, labels, needed)


def _refuse_other_width(trial: TrialRecord | Refusal, expected: int) -> TrialRecord | Refusal:
    if isinstance(trial, Refusal) or trial.num_features == expected:
        return trial
    return Refusal(trial.trial_id, "wrong_feature_count", f"{trial.num_features} features, expected {expected}")
