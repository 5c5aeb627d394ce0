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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from xla_b2t.errors import UserError
from xla_b2t.xla.hlo_metadata import settled
from xla_b2t.xla.slices import Slice
from xla_b2t.xla.tpu_compiler_child import UNKNOWN_SLICE, Task, verdict_file
from xla_b2t.xla.tracing_process import child_process, is_running
from xla_b2t.xla.verdict import Verdict, unpacked
from xla_b2t.xla.verdict_cache import VerdictCache, key

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
    """Compiles one program; arguments as of `compile_programs`.

    Raises:
        UserError: as of `compile_programs`, or the compiler gave no answer.
    """
    (verdict,) = compile_programs([program], goal, num_replicas, flags, cache, limit_seconds)
    if verdict.crash:
        raise verdict.crash
    return verdict


def compile_programs(
    programs: Sequence[bytes],
    goal: Slice,
    num_replicas: int,
    flags: Sequence[str] = (),
    cache: Path | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    on_verdict: Callable[[int, Verdict], None] | None = None,
) -> list[Verdict]:
    """Compiles several programs, one after the other, for the price of one start of the compiler.

    Programs that are the same to the compiler are compiled once. One that the compiler crashes on, or takes too long
    over, has a verdict that says so (`Verdict.crash`). Those before it keep theirs, and a new process goes on behind
    it. Nothing goes on compiling when this process ends.

    Args:
        programs: serialised HloModuleProtos.
        goal: what they are meant for, from `slice_named`.
        num_replicas: devices that run each program together, at most those of the slice.
        flags: more flags for libtpu.
        cache: a folder of verdicts, such as `default_folder()`: what is there is not compiled again, and what is
            compiled is put there. None for neither.
        limit_seconds: for the compiler's start, and for each program.
        on_verdict: told the number of each program and its verdict as soon as there is one.

    Returns:
        A verdict for each, in order.

    Raises:
        UserError: libtpu or JAX is missing, libtpu does not know the slice, or the compiler cannot be started.
    """
    if missing := _missing():
        raise UserError(
            f"the TPU's compiler is not installed ({', '.join(missing)})",
            f"Python {sys.version_info.major}.{sys.version_info.minor}",
            "pip install 'xla_b2t[tpu-compiler]' with Python 3.11 or 3.12",
        )
    environment = _environment(goal, flags)
    inputs = [settled(program) for program in programs]
    store = VerdictCache(cache) if cache else None
    names = [key(each, _circumstances(goal, num_replicas, environment)) for each in inputs]
    verdicts: dict[str, Verdict] = {}

    def arrived(name: str, verdict: Verdict) -> None:
        verdicts[name] = verdict
        if store and verdict.can_be_kept:
            store.keep(name, verdict)
        for index, its_name in enumerate(names):
            if on_verdict and its_name == name:
                on_verdict(index, verdict)

    different = dict(zip(names, inputs, strict=True))
    for name in different:
        if store and (known := store.find(name)):
            arrived(name, known)
    rest = [name for name in different if name not in verdicts]
    if rest:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            Task(goal.topology, dict(goal.options), num_replicas, limit_seconds).write(folder)
            for place, name in enumerate(rest):
                (folder / f"{place}.hlo").write_bytes(different[name])
            _compile(folder, goal, environment, limit_seconds, len(rest), lambda place, v: arrived(rest[place], v))
    return [verdicts[name] for name in names]


def _missing() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _compile(
    folder: Path,
    goal: Slice,
    environment: Mapping[str, str],
    limit_seconds: float,
    num_programs: int,
    arrived: Callable[[int, Verdict], None],
) -> None:
    done = 0
    while done < num_programs:
        with child_process(_CHILD, [str(folder), str(done)], environment, folder / "log.txt") as child:
            goes_on = True
            while goes_on and done < num_programs:
                goes_on = is_running(child, _LOOK_EVERY_SECONDS)  # asked first, so that the last files are not missed
                while done < num_programs and (path := verdict_file(folder, done)).exists():
                    arrived(done, unpacked(path.read_bytes()))
                    done += 1
        if done == num_programs:
            return  # however the process ended, or would have
        has_begun = (folder / str(done)).exists()
        crash = _crash(child.returncode, folder, goal, limit_seconds, has_begun)
        if not has_begun:
            raise crash
        arrived(done, Verdict(accepted=False, crash=crash))
        done += 1


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
