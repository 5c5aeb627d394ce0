"""Data at full size: converting, reading, and what others do with the same trials, side by side in one run.

Simulates a source in the public layout: random features, lengths from a lognormal like the public data's (median 836,
p95 1426, 80 to 2475 bins), 45 sessions. Then: `prebatch` beside h5py reading the same files; batches of 64 trials by
our reader, as a rank reads them, beside the published `BrainToTextDataset` under PyTorch's DataLoader, and beside
copying the same bytes in memory; 1, 2 and 8 processes reading at once. Medians, everything from the page cache.

Usage: python benchmarks/data_reading.py [--trials 1200] [--folder DIR] [--dataset model_training/dataset.py]
The published dataset.py is of the repository Neuroprosthetics-Lab/nejm-brain-to-text; without it its rows are left out.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

SESSIONS, FEATURES, BATCH, PUBLISHED_BATCHES, REPEATS = 45, 512, 64, 16, 5


def main() -> int:
    """Prints a table of what is asked for and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1200)
    parser.add_argument("--folder", type=Path, help="keeps source and groups there (default: a temporary one)")
    parser.add_argument("--dataset", type=Path, help="the published dataset.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        source, groups = folder / "trials", folder / "groups"
        if not source.exists():
            simulate(source, args.trials)
        converting(source, groups)
        ours = reading(groups)
        if args.dataset:
            published(source, args.dataset, ours)
        together(groups)
    return 0


def simulate(source: Path, num_trials: int) -> None:
    """Writes the source."""
    generator = np.random.default_rng(0)
    noise_TC = generator.standard_normal((5000, FEATURES), dtype=np.float32)
    for session in range(SESSIONS):
        folder = source / f"t15.2023.{8 + session // 28:02d}.{1 + session % 28:02d}"
        folder.mkdir(parents=True)
        with h5py.File(folder / "data_train.hdf5", "w") as file:
            for number in range(num_trials // SESSIONS + (session < num_trials % SESSIONS)):
                bins = int(np.clip(np.exp(np.log(836) + 0.325 * generator.standard_normal()), 80, 2475))
                node = file.create_group(f"trial_{number:04d}")
                start = int(generator.integers(len(noise_TC) - bins))
                node["input_features"] = noise_TC[start : start + bins]
                for name, values in (("seq_class_ids", generator.integers(1, 41, 20)), ("transcription", [65] * 20)):
                    node[name] = np.pad(np.asarray(values, np.int32), (0, 480))
                node.attrs.update(n_time_steps=bins, seq_len=20, block_num=1, trial_num=number)
                node.attrs.update(session=folder.name, sentence_label="A" * 20)


def converting(source: Path, groups: Path) -> None:
    """`prebatch` beside reading alone, and the memory that it takes."""
    from xla_b2t.data.prebatch import PrebatchSettings, prebatch

    files = sorted(source.rglob("*.hdf5"))

    def read_alone() -> int:
        num_bytes = 0
        for path in files:
            with h5py.File(path, "r") as file:
                for name in file:
                    num_bytes += file[name]["input_features"][()].nbytes
        return num_bytes

    def convert() -> None:
        prebatch(source, groups, PrebatchSettings(overwrite=True), num_workers=workers)

    num_bytes = read_alone()
    workers = len(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"alone": [], "prebatch": []}
    with peak_memory() as peak:
        for _ in range(3):
            seconds["alone"].append(timed(read_alone))
            seconds["prebatch"].append(timed(convert))
    alone, ours = (num_bytes / 1e6 / statistics.median(seconds[name]) for name in ("alone", "prebatch"))
    print(f"source: {num_bytes / 1e6:,.0f} MB of features, {len(files)} files")
    rates = f"{ours:,.0f} MB/s of source; h5py reading alone, one process: {alone:,.0f} MB/s"
    print(f"prebatch, {workers} workers: {rates}; {ours / alone:.0%} (asked: 70 %)")
    print(f"memory while converting, all processes: {peak['bytes'] / 1e6:,.0f} MB")


def reading(groups: Path) -> float:
    """Our trials a second, beside copying in memory; returns them. Batches of short buckets are not all full."""
    reader, batches = batches_of(groups)
    for bucket, numbers in batches:
        reader.read(numbers, bucket)  # checksums are verified the first time
    parts = [[reader.read([number], bucket).features_BTC for number in numbers] for bucket, numbers in batches]
    num_bytes = sum(part.nbytes for of_batch in parts for part in of_batch)
    for of_batch in parts:
        for part in of_batch:
            part.max()  # its pages are there
    pairs = [(timed(lambda: each(reader, batches)), timed(lambda: one_by_one(parts))) for _ in range(REPEATS)]
    ours, plain = (num_bytes / 1e9 / statistics.median(column) for column in zip(*pairs, strict=True))
    num_trials = sum(int(reader.index.num_valid_G[numbers].sum()) for _, numbers in batches)
    rate = num_trials / statistics.median(pair[0] for pair in pairs)
    print(f"reader, {num_trials / len(batches):.1f} trials a batch: {rate:,.0f} trials/s, {ours:.2f} GB/s")
    print(f"a plain copy of the same bytes: {plain:.2f} GB/s, of which the reader has {ours / plain:.0%} (asked: 70 %)")
    return rate


def published(source: Path, path: Path, ours: float) -> None:
    """The published data set under PyTorch's loader."""
    import torch

    spec = importlib.util.spec_from_file_location("published_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trials = {}
    for day, file in enumerate(sorted(source.rglob("*.hdf5"))):
        with h5py.File(file, "r") as handle:
            trials[day] = {"trials": list(range(len(handle))), "session_path": str(file)}
    for workers in (0, 2, 4):
        dataset = module.BrainToTextDataset(trials, PUBLISHED_BATCHES, "train", BATCH, 4, random_seed=1)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
        rate = BATCH * statistics.median(batches_a_second(loader) for _ in range(3))
        times = f"ours is {ours / rate:.0f} times that (asked: 20)"
        print(f"published data set, {workers} workers: {rate:,.0f} trials/s, {rate / BATCH:.1f} batches/s; {times}")


def batches_a_second(loader) -> float:
    """From the first batch on, so that the start of workers does not count, and what they fetch ahead does."""
    batches = iter(loader)
    next(batches)
    return (PUBLISHED_BATCHES - 1) / timed(lambda: [None for _ in batches])


def together(groups: Path) -> None:
    """Several processes at once."""
    context = multiprocessing.get_context("spawn")
    for ranks in (1, 2, 8):
        barrier, queue = context.Barrier(ranks), context.Queue()
        shares = [(groups, rank, ranks, barrier, queue) for rank in range(ranks)]
        processes = [context.Process(target=read_as_rank, args=share) for share in shares]
        for process in processes:
            process.start()
        found = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        num_bytes, begins, ends = zip(*found, strict=True)
        rate = sum(num_bytes) / (max(ends) - min(begins)) / 1e9
        print(f"{ranks} ranks: {rate:.2f} GB/s in all, {rate / 0.6:.1f} times parity with an RTX 4090 (0.6 GB/s)")


def read_as_rank(groups: Path, rank: int, ranks: int, barrier, queue) -> None:
    """One process: its share of the batches, several times."""
    reader, batches = batches_of(groups)
    mine = batches[rank % len(batches) :: ranks] or batches[:1]
    num_bytes = 0
    each(reader, mine)
    barrier.wait()
    begin = time.time()
    for _ in range(REPEATS):
        for bucket, numbers in mine:
            num_bytes += reader.read(numbers, bucket).features_BTC.nbytes
    queue.put((num_bytes, begin, time.time()))


def batches_of(groups: Path):
    """A reader, and the batches of one epoch of one rank: (bucket, groups)."""
    from xla_b2t.data.group_reader import GroupReader
    from xla_b2t.data.groups import open_group_set
    from xla_b2t.data.schedule import Schedule

    group_set = open_group_set(groups)
    schedule = Schedule("epochs", group_set.splits["train"], 0, BATCH // group_set.group_size)
    updates = [schedule.update(step) for step in range(schedule.updates_per_epoch)]
    return GroupReader(group_set, "train"), [(update.bucket, list(update.groups)) for update in updates]


def each(reader, batches) -> None:
    """Reads them, and lets each go."""
    for bucket, numbers in batches:
        reader.read(numbers, bucket)


def one_by_one(parts: list[list[np.ndarray]]) -> None:
    """Copies the parts of each batch together, and lets each go."""
    for of_batch in parts:
        np.concatenate(of_batch)


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Most PSS of this process and all that it started meanwhile, sampled every 50 ms."""
    found, ended = {"bytes": 0}, threading.Event()

    def sample() -> None:
        while not ended.wait(0.05):
            found["bytes"] = max(found["bytes"], pss(os.getpid()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def pss(pid: int) -> int:
    """Bytes of a process and what it started."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return total
    return total + sum(pss(int(child)) for child in children)


if __name__ == "__main__":
    sys.exit(main())
