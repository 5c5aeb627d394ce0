"""Thousands of damaged sources and groups: each must end in a clear error, a counted refusal or the same data.

A case that crashes the process, hangs it, ends in another error or gives other data than before is a defect, and its
number repeats it. The ways of damage are in tests/data/damage.py, what must come of them in damage_outcome.py.

Usage: python benchmarks/damaged_data.py [--sources 1000] [--groups 1500] [--first 0] [--say]
"""

import argparse
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 120


def main() -> int:
    """Prints what became of the cases; 1 where there is a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=1000, help="cases of damaged sources")
    parser.add_argument("--groups", type=int, default=1500, help="cases of damaged groups")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--say", action="store_true", help="print every case")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder)
        counts = {"source": args.sources, "groups": args.groups}
        cases = [(kind, args.first + number) for kind, count in counts.items() for number in range(count)]
        results = run(folder, cases, args.processes)
    for kind in ("source", "groups"):
        of_kind = {seed: result for (its_kind, seed), result in results.items() if its_kind == kind}
        if args.say:
            for seed, (damage, said, _) in sorted(of_kind.items()):
                print(f"{kind} {seed}: {damage} -> {said}")
        counts = Counter("defect" if is_defect else general(said) for _, said, is_defect in of_kind.values())
        print(f"\n{kind}: {len(of_kind)} cases")
        for said, count in counts.most_common():
            print(f"{count:6d}  {said}")
    defects = {case: result for case, result in results.items() if result[2]}
    for (kind, seed), (damage, said, _) in sorted(defects.items()):
        print(f"\nDEFECT {kind} {seed}: {damage}\n{said}")
    print(f"\n{len(results)} cases, {len(defects)} defects, {time.monotonic() - began:.0f} s")
    return 1 if defects else 0


def general(said: str) -> str:
    """What was said, without numbers and places."""
    return re.sub(r"\d[\d,.]*", "N", said.partition(" [")[0])[:90]


def prepare(folder: Path) -> None:
    """The pristine source and groups."""
    from xla_b2t.data.prebatch import prebatch
    from xla_b2t.data.synth import SynthSettings, synthesize

    synth = SynthSettings(sessions=2, trials=7, held_out_share=0.4, features=8, seed=5, bins_per_phoneme=3)
    synthesize(folder / "source", synth)
    prebatch(folder / "source", folder / "groups", settings())


def settings():
    """Of every conversion."""
    from xla_b2t.data.prebatch import PrebatchSettings

    return PrebatchSettings(group_size=2, num_buckets=2, patch_bins=4, patch_stride=2)


def run(folder: Path, cases: list[tuple[str, int]], num_processes: int) -> dict[tuple[str, int], tuple[str, str, bool]]:
    """What became of each case: the damage, what was said, and whether that is a defect."""
    context = multiprocessing.get_context("spawn")
    waiting, results = list(reversed(cases)), {}
    workers: list[Worker] = []
    while waiting or workers:
        while waiting and len(workers) < num_processes:
            share = [waiting.pop() for _ in range(min(50, len(waiting)))]
            workers.append(Worker(context, folder, share))
        for worker in list(workers):
            results.update(worker.collected())
            if worker.is_over():
                workers.remove(worker)
                if worker.left:  # the first of them ended the process, or kept it busy for too long
                    case, *rest = worker.left
                    results[case] = ("not known", f"the process ended with {worker.process.exitcode}", True)
                    waiting += reversed(rest)
        time.sleep(0.05)
    return results


class Worker:
    """A process that works through cases, and is ended where one takes too long."""

    def __init__(self, context, folder: Path, cases: list[tuple[str, int]]):
        self.left = list(cases)
        self._ours, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(folder, cases, theirs))
        self.process.start()
        theirs.close()
        self._since = time.monotonic()
        self._is_over = False

    def collected(self) -> dict:
        """The results that have come."""
        results = {}
        try:
            while self._ours.poll():
                case, *result = self._ours.recv()
                results[case] = tuple(result)
                self.left.remove(case)
                self._since = time.monotonic()
        except EOFError:
            self._is_over = True
            self.process.join()
        return results

    def is_over(self) -> bool:
        """It has ended, by itself or here, and everything that it said is collected."""
        if time.monotonic() - self._since > LIMIT_SECONDS:
            self.process.kill()
        return self._is_over


def work(folder: Path, cases: list[tuple[str, int]], pipe) -> None:
    """The process: one case after the other, each in a folder of its own."""
    sys.path.insert(0, str(ROOT / "tests" / "data"))
    from damage_outcome import outcome_of_groups, outcome_of_source

    for kind, seed in cases:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            here = Path(made)
            try:
                if kind == "source":
                    outcome = outcome_of_source(folder / "source", settings(), seed, here)
                else:
                    outcome = outcome_of_groups(folder / "groups", seed, here)
                pipe.send(((kind, seed), outcome.damage, outcome.said, False))
            except BaseException:
                pipe.send(((kind, seed), "see below", traceback.format_exc()[-1500:], True))
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
