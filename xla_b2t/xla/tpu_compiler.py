"""The TPU's own compiler, on a machine that has no TPU: libtpu through JAX's compile-only client.

In: programs (`xla/trace.py`) and the slice they are meant for. Out: a `Verdict` for each, with the compiled program as
text. The compiler runs in a process of its own (`tpu_compiler_child.py`), since it can abort on odd shapes and logs to
stderr; a crash is an answer like others. Verdicts can be kept (`verdict_cache.py`).
Needs the extra `tpu-compiler` (CPython 3.11 or 3.12).
"""

import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

from xla_b2t.errors import UserError
from xla_b2t.files import replacing
from xla_b2t.xla.hlo_metadata import settled
from xla_b2t.xla.slices import Slice
from xla_b2t.xla.tpu_compiler_child import UNKNOWN_SLICE, Task, program_file, verdict_file
from xla_b2t.xla.tracing_process import child_process, is_running
from xla_b2t.xla.verdict import Verdict, unpacked
from xla_b2t.xla.verdict_cache import VerdictCache, key

OnVerdict = Callable[[int, Verdict], None]

LIMIT_SECONDS = 1200.0
"""For the compiler's start, and for each program."""

_CHILD = "xla_b2t.xla.tpu_compiler_child"
_PACKAGES = ("jax", "jaxlib", "libtpu")
_LOOK_EVERY_SECONDS = 0.1

# What torch_xla 2.9 hands to libtpu when it starts on a TPU (torch_xla/__init__.py, _setup_libtpu_flags), so that the
# program judged is the program that would run.
_FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false",
    "--xla_latency_hiding_scheduler_rerun=1",
    "--xla_tpu_prefer_async_allgather_to_allreduce=true",
    "--xla_tpu_enable_flash_attention=false",
    "--xla_enable_async_all_gather=true",
    "--xla_enable_async_collective_permute=true",
)


def is_installed() -> bool:
    """Whether there is a compiler to ask."""
    return not _missing()


def compile_program(
    program: bytes,
    goal: Slice,
    num_replicas: int,
    flags: Sequence[str] = (),
    cache: Path | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Verdict:
    """Compiles one program; arguments as of `TpuCompiler`.

    Raises:
        UserError: as of `TpuCompiler`, or the compiler gave no answer.
    """
    (verdict,) = compile_programs([program], goal, num_replicas, flags, cache, limit_seconds)
    if verdict.crash:
        raise verdict.crash
    return verdict


def compile_programs(
    programs: Iterable[bytes],
    goal: Slice,
    num_replicas: int,
    flags: Sequence[str] = (),
    cache: Path | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    on_verdict: OnVerdict | None = None,
) -> list[Verdict]:
    """Compiles several programs, for the price of one start of the compiler; the rest as of `TpuCompiler`."""
    with TpuCompiler(goal, num_replicas, flags, cache, limit_seconds) as compiler:
        return compiler.compile(programs, on_verdict)


@final
class TpuCompiler:
    """The compiler, started with the first program whose verdict is not known, and running until this is left.

    Use it as a context manager: nothing goes on compiling when it is left, or when this process ends.

    Args:
        goal: the slice that the programs are meant for, from `slice_named`.
        num_replicas: devices that run each program together, at most those of the slice.
        flags: more flags for libtpu.
        cache: a folder of verdicts, such as `default_folder()`: what is there is not compiled again, and what is
            compiled is put there. None for neither.
        limit_seconds: for the compiler's start, and for each program.

    Raises:
        UserError: libtpu or JAX is missing.
    """

    def __init__(
        self,
        goal: Slice,
        num_replicas: int,
        flags: Sequence[str] = (),
        cache: Path | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ):
        if missing := _missing():
            raise UserError(
                f"the TPU's compiler is not installed ({', '.join(missing)})",
                f"Python {sys.version_info.major}.{sys.version_info.minor}",
                "pip install 'xla_b2t[tpu-compiler]' with Python 3.11 or 3.12",
            )
        self._goal, self._num_replicas, self._limit_seconds = goal, num_replicas, limit_seconds
        self._environment = _environment(goal, flags)
        self._circumstances = _circumstances(goal, num_replicas, self._environment)
        self._store = VerdictCache(cache) if cache else None
        self._verdicts: dict[str, Verdict] = {}
        self._stack = ExitStack()
        self._folder = Path()
        self._handed_over: list[str] = []  # names of the programs in the folder, by number
        self._num_answered = 0
        self._child: subprocess.Popen | None = None

    def __enter__(self) -> "TpuCompiler":
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        Task(self._goal.topology, dict(self._goal.options), self._num_replicas, self._limit_seconds).write(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(self, programs: Iterable[bytes], on_verdict: OnVerdict | None = None) -> list[Verdict]:
        """Compiles programs one after the other, beginning with the first while the next are still being made.

        Programs that are the same to the compiler are compiled once. One that the compiler crashes on, or takes too
        long over, has a verdict that says so (`Verdict.crash`). Those before it keep theirs, and a new process goes on
        behind it.

        Args:
            programs: serialised HloModuleProtos.
            on_verdict: told the number of each program and its verdict as soon as there is one; the compiler goes on
                with the next meanwhile.

        Returns:
            A verdict for each, in order.

        Raises:
            UserError: libtpu does not know the slice, or the compiler cannot be started.
        """
        names: list[str] = []
        told: set[int] = set()

        def tell() -> None:
            for index, name in enumerate(names):
                if name in self._verdicts and index not in told:
                    told.add(index)
                    if on_verdict:
                        on_verdict(index, self._verdicts[name])

        for program in programs:
            names.append(self._hand_over(settled(program)))
            self._collect(0)
            tell()
        while len(told) < len(names):
            self._collect(_LOOK_EVERY_SECONDS)
            tell()
        return [self._verdicts[name] for name in names]

    def _hand_over(self, program: bytes) -> str:
        """Gives a program to the compiler if nobody did and its verdict is not known; returns its name."""
        name = key(program, self._circumstances)
        if name in self._verdicts or name in self._handed_over:
            return name
        if self._store and (known := self._store.find(name)):
            self._verdicts[name] = known
            return name
        with replacing(program_file(self._folder, len(self._handed_over))) as partial:
            partial.write_bytes(program)
        self._handed_over.append(name)
        return name

    def _collect(self, wait_seconds: float) -> None:
        """Takes the verdicts that have come, and starts the compiler where it waits for that."""
        if self._num_answered == len(self._handed_over):
            return
        if self._child is None:
            started = child_process(
                _CHILD, [str(self._folder), str(self._num_answered)], self._environment, self._folder / "log.txt"
            )
            self._child = self._stack.enter_context(started)
        goes_on = is_running(self._child, wait_seconds)  # asked first, so that the last files are not missed
        while (path := verdict_file(self._folder, self._num_answered)).exists():
            self._answered(unpacked(path.read_bytes()))
        if goes_on:
            return
        code, self._child = self._child.returncode, None
        if self._num_answered == len(self._handed_over):
            return  # however it ended
        has_begun = (self._folder / str(self._num_answered)).exists()
        crash = _crash(code, self._folder, self._goal, self._limit_seconds, has_begun)
        if not has_begun:
            raise crash
        self._answered(Verdict(accepted=False, crash=crash))

    def _answered(self, verdict: Verdict) -> None:
        name = self._handed_over[self._num_answered]
        self._num_answered += 1
        self._verdicts[name] = verdict
        if self._store and verdict.can_be_kept:
            self._store.keep(name, verdict)


def _missing() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _crash(code: int, folder: Path, goal: Slice, limit_seconds: float, has_begun: bool) -> UserError:
    if code == UNKNOWN_SLICE:
        return UserError(
            f"libtpu {importlib.metadata.version('libtpu')} has no {goal.topology} with so many devices: "
            + (folder / "unknown").read_text(),
            goal.name,
            "take another slice, such as v5e-8",
        )
    if code == -signal.SIGALRM:
        return UserError(
            f"the TPU's compiler did not answer within {limit_seconds:g} s", goal.name, "try a smaller bucket"
        )
    log = (folder / "log.txt").read_text(errors="replace")
    if not has_begun:
        return UserError(
            f"the TPU's compiler did not start, it ended with {code}: {_last_words(log)}",
            f"starting it for {goal.name}",
            "do what it says; if it is about a flag, look at LIBTPU_INIT_ARGS",
        )
    return UserError(
        f"the TPU's compiler ended with {code}: {_last_words(log)}",
        f"compiling for {goal.name}",
        "report it with the lines above: the compiler itself failed on this program",
    )


def _environment(goal: Slice, flags: Sequence[str]) -> dict[str, str]:
    return {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a compiler holds no chip
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": goal.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join([*_with_defaults(os.environ.get("LIBTPU_INIT_ARGS", "").split()), *flags]),
        "XLA_FLAGS": "",  # meant for this machine's own compiler
    }


def _with_defaults(given: list[str]) -> list[str]:
    names = {flag.partition("=")[0] for flag in given}
    return given + [flag for flag in _FLAGS if flag.partition("=")[0] not in names]


def _circumstances(goal: Slice, num_replicas: int, environment: Mapping[str, str]) -> dict:
    """What a verdict depends on besides the program."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "slice": [goal.topology, dict(goal.options)],
        "num_replicas": num_replicas,
        "environment": dict(environment),
    }


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check failed|F0|FATAL|Error|error", line)]
    return (telling or lines or ["it said nothing"])[-1][:400]
