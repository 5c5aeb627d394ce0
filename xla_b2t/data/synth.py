"""A simulated participant in the layout of the public brain-to-text data. docs/FORMAT.md describes the layout.

In: settings. Out: `<folder>/t15.YYYY.MM.DD/data_{train,val,test}.hdf5`, and `simulation.json`.
What is said comes from `sentences`, how it moves the mouth from `articulation`, what electrodes record from `tuning`.
A sentence of `val` or `test` never occurs in `train`. The root of each file says that it is simulated.
"""

import datetime
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from xla_b2t.data.articulation import trajectory
from xla_b2t.data.scan import Progress
from xla_b2t.data.sentences import Sentence, draw_sentences
from xla_b2t.data.trials import SPLITS
from xla_b2t.data.tuning import NUM_ARRAYS, Tuning, record, session_tunings
from xla_b2t.errors import UserError
from xla_b2t.files import replacing

NOTE = "simulation.json"
BLOCK_TRIALS = 50
LABEL_PLACES = 500
_FIRST_DAY = datetime.date(2023, 8, 11)
_CALENDAR_STREAM, _TRIAL_STREAM, _SPLIT_STREAM = 6, 7, 8


@dataclass(frozen=True)
class SynthSettings:
    """A participant.

    Attributes:
        sessions: days of recording.
        trials: training sentences a session.
        held_out_share: sentences of `val`, and as many of `test`, for each training sentence (0.18 in the public data).
        train_only_sessions: the first sessions have no `val` and `test` (4 of 45 in the public data).
        features: a multiple of 8: 4 arrays, threshold crossings and spike-band power (512 in the public data).
        seed: everything follows from it.
        bins_per_phoneme: mean length of a phoneme, bins of 20 ms (about 28 in the public data).
        silence_bins: mean silence before and after a sentence, bins.
        signal: strength of the tuning against the noise.
        drift: change of the tuning in a week, 0 none, 1 all.
        sentences: a text file of own sentences, one a line; "" takes those of the package.
        gzip: compress the features.
        overwrite: replace a simulation that is in the output folder.
    """

    sessions: int = 4
    trials: int = 100
    held_out_share: float = 0.18
    train_only_sessions: int = 0
    features: int = 128
    seed: int = 0
    bins_per_phoneme: float = 7.0
    silence_bins: float = 12.0
    signal: float = 0.4
    drift: float = 0.25
    sentences: str = ""
    gzip: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("sessions", 1, 1000), ("trials", 1, 100_000), ("held_out_share", 0, 10), ("train_only_sessions", 0, 1000),
            ("seed", 0, 2**63), ("bins_per_phoneme", 2, 1000), ("silence_bins", 0, 10_000), ("signal", 0, 100),
            ("drift", 0, 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{name} is {value}, expected {least} to {most}", flag, "give a number in that range")
        if self.features < 2 * NUM_ARRAYS or self.features % (2 * NUM_ARRAYS):
            raise UserError(
                f"features is {self.features}, expected a multiple of {2 * NUM_ARRAYS}: "
                f"{NUM_ARRAYS} arrays with threshold crossings and spike-band power",
                "--features", "give 128, 256 or 512",
            )  # fmt: skip

    @property
    def held_out_trials(self) -> int:
        """Sentences of `val`, and of `test`, in a session that has them."""
        return int(np.ceil(self.trials * self.held_out_share))


@dataclass(frozen=True)
class SynthReport:
    """What was written. `mean_bins` and `longest_bins` are over all trials, `mean_phonemes` counts silences."""

    folder: str
    sessions: tuple[str, ...]
    trials: dict[str, int]
    mean_bins: float
    longest_bins: int
    mean_phonemes: float
    distinct_words: int
    bytes: int


@dataclass(frozen=True)
class _Place:
    """Where a trial belongs: its split, its number in the split's file, its block and number in the block."""

    split: str
    number: int
    block: int
    number_in_block: int


def synthesize(out_dir: str | Path, settings: SynthSettings, progress: Progress = lambda *_: None) -> SynthReport:
    """Writes a simulated participant. The same settings give the same bytes.

    Raises:
        UserError: the folder is in use or cannot be written, or there are fewer distinct sentences than trials.
    """
    out = Path(out_dir)
    names, gaps = _calendar(settings)
    places = [_places(settings, session) for session in range(settings.sessions)]
    sentences = draw_sentences(sum(len(of_session) for of_session in places), settings.seed, settings.sentences)
    _refuse_long(sentences, settings.sentences)
    try:
        _prepare_folder(out, settings.overwrite)
        lengths = _write_sessions(out, names, gaps, places, sentences, settings, progress)
    except OSError as error:
        raise UserError(
            f"the trials cannot be written: {error}", str(out), "make room, or give another folder"
        ) from error
    report = SynthReport(
        folder=str(out),
        sessions=names,
        trials={split: sum(place.split == split for of_session in places for place in of_session) for split in SPLITS},
        mean_bins=float(np.mean(lengths)),
        longest_bins=max(lengths),
        mean_phonemes=float(np.mean([len(sentence.labels) for sentence in sentences])),
        distinct_words=len({word.strip(".?") for sentence in sentences for word in sentence.text.lower().split()}),
        bytes=sum(file.stat().st_size for file in out.glob("*/*.hdf5")),
    )
    return report


def _write_sessions(
    out: Path,
    names: tuple[str, ...],
    gaps: list[int],
    places: list[list[_Place]],
    sentences: list[Sentence],
    settings: SynthSettings,
    progress: Progress,
) -> list[int]:
    """Writes every session and then the note that all is there; returns the length of every trial."""
    tunings = session_tunings(settings.seed, gaps, settings.features, settings.signal, settings.drift)
    remaining, lengths = iter(sentences), []
    _write_note(out, settings, complete=False)
    for session, name in enumerate(names):
        progress("simulate", session, len(names))
        said = [(place, next(remaining)) for place in places[session]]
        lengths += _write_session(out / name, said, session, tunings[session], settings)
    progress("simulate", len(names), len(names))
    _write_note(out, settings, complete=True)
    return lengths


def _write_session(
    folder: Path, said: list[tuple[_Place, Sentence]], session: int, tuning: Tuning, settings: SynthSettings
) -> list[int]:
    """Writes the files of a session, a block in memory at a time; returns the length of every trial."""
    folder.mkdir()
    lengths = []
    with ExitStack() as stack:
        files = {}
        for split in dict.fromkeys(place.split for place, _ in said):
            partial = stack.enter_context(replacing(folder / f"data_{split}.hdf5"))
            files[split] = stack.enter_context(h5py.File(partial, "w"))
            files[split].attrs["simulated"] = True
            files[split].attrs["settings"] = json.dumps(_lasting(settings))
        for block in _by_block(said):
            recorded = [_record_trial(settings, session, place, sentence, tuning) for place, sentence in block]
            for (place, sentence), features_TC in zip(block, _z_score(recorded), strict=True):
                _write_trial(files[place.split], place, sentence, features_TC, folder.name, settings.gzip)
                lengths.append(len(features_TC))
    return lengths


def _record_trial(
    settings: SynthSettings, session: int, place: _Place, sentence: Sentence, tuning: Tuning
) -> np.ndarray:
    key = [settings.seed, _TRIAL_STREAM, session, place.block, place.number_in_block]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    path_TA = trajectory(sentence.labels, settings.bins_per_phoneme, settings.silence_bins, generator)
    return record(path_TA, tuning, generator)


def _z_score(recorded: list[np.ndarray]) -> list[np.ndarray]:
    """Takes each feature's mean and standard deviation over a block out of it, as the public data were prepared."""
    everything = np.concatenate(recorded)
    mean_C, deviation_C = everything.mean(axis=0, dtype=np.float64), everything.std(axis=0, dtype=np.float64)
    return [((trial_TC - mean_C) / np.maximum(deviation_C, 1e-6)).astype(np.float32) for trial_TC in recorded]


def _write_trial(
    file: h5py.File, place: _Place, sentence: Sentence, features_TC: np.ndarray, session: str, gzip: bool
) -> None:
    node = file.create_group(f"trial_{place.number:04d}")
    compression = {"compression": "gzip"} if gzip else {}
    node.create_dataset("input_features", data=features_TC, track_times=False, **compression)
    node.attrs["n_time_steps"] = np.int64(len(features_TC))
    node.attrs["session"] = session
    node.attrs["block_num"] = np.int64(place.block)
    node.attrs["trial_num"] = np.int64(place.number_in_block)
    if place.split == "test":
        return
    labels, characters = np.zeros(LABEL_PLACES, np.int32), np.zeros(LABEL_PLACES, np.int32)
    labels[: len(sentence.labels)] = sentence.labels
    characters[: len(sentence.text)] = [ord(character) for character in sentence.text]
    node.create_dataset("seq_class_ids", data=labels, track_times=False)
    node.create_dataset("transcription", data=characters, track_times=False)
    node.attrs["seq_len"] = np.int64(len(sentence.labels))
    node.attrs["sentence_label"] = sentence.text


def _places(settings: SynthSettings, session: int) -> list[_Place]:
    """Every trial of a session, block by block: those of `train`, then blocks that `val` and `test` share at random."""
    held_out = 0 if session < settings.train_only_sessions else settings.held_out_trials
    shared = np.array(["val"] * held_out + ["test"] * held_out)
    np.random.Generator(np.random.Philox(np.random.SeedSequence([settings.seed, _SPLIT_STREAM, session]))).shuffle(
        shared
    )
    counts, places, block = dict.fromkeys(SPLITS, 0), [], 0
    for splits in (["train"] * settings.trials, shared.tolist()):
        for number, split in enumerate(splits):
            block += number % BLOCK_TRIALS == 0
            places.append(_Place(split, counts[split], block, number % BLOCK_TRIALS))
            counts[split] += 1
    return places


def _by_block(said: list[tuple[_Place, Sentence]]) -> Iterator[list[tuple[_Place, Sentence]]]:
    for block in dict.fromkeys(place.block for place, _ in said):
        yield [(place, sentence) for place, sentence in said if place.block == block]


def _calendar(settings: SynthSettings) -> tuple[tuple[str, ...], list[int]]:
    """Names of the sessions, which are dates, and the days since the one before (0 for the first)."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([settings.seed, _CALENDAR_STREAM])))
    gaps = [0, *(int(gap) for gap in generator.integers(2, 13, settings.sessions - 1))]
    days = [_FIRST_DAY + datetime.timedelta(int(day)) for day in np.cumsum(gaps)]
    return tuple(f"t15.{day:%Y.%m.%d}" for day in days), gaps


def _refuse_long(sentences: list[Sentence], where: str) -> None:
    for sentence in sentences:
        longest = max(len(sentence.labels), len(sentence.text))
        if longest > LABEL_PLACES:
            raise UserError(
                f"a sentence has {longest} phonemes or letters, the layout holds {LABEL_PLACES}: {sentence.text[:30]}",
                where, "shorten it",
            )  # fmt: skip


def _prepare_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError("this is a file, expected a folder to write to", str(out), "give another folder")
    if out.is_dir() and any(out.iterdir()):
        complete = _read_complete(out / NOTE)
        if complete is None:
            raise UserError(
                f"the folder is not empty, and is no simulation (no {NOTE})", str(out), "give another folder"
            )
        if complete and not overwrite:
            raise UserError("there is a simulation here already", str(out), "add --overwrite, or give another folder")
        for session in out.glob("t15.*"):
            shutil.rmtree(session)
    out.mkdir(parents=True, exist_ok=True)


def _write_note(out: Path, settings: SynthSettings, complete: bool) -> None:
    with replacing(out / NOTE) as partial:
        content = {"complete": complete, "settings": _lasting(settings)}
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_complete(note: Path) -> bool | None:
    """Whether the simulation that a note is of was finished; None without a note that can be read."""
    try:
        return bool(json.loads(note.read_text(encoding="utf-8"))["complete"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lasting(settings: SynthSettings) -> dict[str, Any]:
    """The settings that leave a mark on the files."""
    return {name: value for name, value in asdict(settings).items() if name != "overwrite"}
