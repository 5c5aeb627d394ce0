"""The TPU's own compiler, on a machine that has no TPU: libtpu through JAX's compile-only client.

In: programs (`xla/trace.py`) and the slice they are meant for. Out: a `Verdict` for each, with the compiled program as
text. The compiler runs in a child process, since it can abort on odd shapes and logs to stderr; a crash is an answer
like others.
Needs the extra `tpu-compiler` (CPython 3.11 or 3.12).
"""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_b2t.errors import UserError

_LIMIT_SECONDS = 1200  # for the start, and for each program
_UNKNOWN_SLICE = 3  # what the child ends with
_REFUSALS = ("RESOURCE_EXHAUSTED", "Ran out of memory in memory space", "CompileTimeHbmOom")

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


@dataclass(frozen=True)
class Verdict:
    """What the compiler said.

    Attributes:
        accepted: the program fits the core's memory.
        refusal: the compiler's words where it does not; "" otherwise.
        crash: what became of the compiler where it gave no answer; None otherwise.
        peak_bytes: most HBM in use at any moment, arguments included.
        argument_bytes, output_bytes, aliased_bytes, temporary_bytes, code_bytes: its parts; aliased counts in both
            arguments and outputs. Temporaries can exceed the peak: the compiler counts them without their lifetimes.
        text: the compiled program, with the compiler's estimates.
        seconds: time it took.
    """

    accepted: bool
    refusal: str = ""
    crash: UserError | None = None
    peak_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    text: str = ""
    seconds: float = 0.0


def compile_program(hlo: bytes, slice_name: str, num_replicas: int, flags: tuple[str, ...] = ()) -> Verdict:
    """Compiles for a slice.

    Args:
        hlo: a serialised HloModuleProto.
        slice_name: as JAX names topologies, such as `v5e:2x4`.
        num_replicas: cores that run the program together, at most those of the slice.
        flags: more flags for libtpu.

    Raises:
        UserError: libtpu or JAX is missing, the slice is unknown, or the compiler did not end well.
    """
    (verdict,) = compile_programs([hlo], slice_name, num_replicas, flags)
    if verdict.crash:
        raise verdict.crash
    return verdict


def compile_programs(
    programs: Sequence[bytes], slice_name: str, num_replicas: int, flags: tuple[str, ...] = ()
) -> list[Verdict]:
    """Compiles several programs, one after the other, for the price of one start of the compiler.

    A program that the compiler crashes on has a verdict that says so (`Verdict.crash`). Those before it keep theirs,
    and a new process goes on behind it.

    Args:
        programs: serialised HloModuleProtos.
        slice_name, num_replicas, flags: as of `compile_program`.

    Returns:
        A verdict for each, in order.

    Raises:
        UserError: libtpu or JAX is missing, the slice is unknown, or the compiler cannot be started.
    """
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"the TPU's compiler is not installed ({', '.join(missing)})",
            f"Python {sys.version_info.major}.{sys.version_info.minor}",
            "pip install 'xla_b2t[tpu-compiler]' with Python 3.11 or 3.12",
        )
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, program in enumerate(programs):
            (folder / f"{index}.hlo").write_bytes(program)
        while len(verdicts) < len(programs):
            first = len(verdicts)
            crash = _run_child(folder, slice_name, num_replicas, flags, first)
            answers = (folder / f"{index}.json" for index in range(first, len(programs)))
            verdicts += [_read(path) for path in itertools.takewhile(Path.exists, answers)]
            assert crash or len(verdicts) == len(programs)
            if crash and not (folder / str(len(verdicts))).exists():
                raise crash  # before it had begun with a program
            if crash:
                verdicts.append(Verdict(accepted=False, crash=crash))
    return verdicts


def _read(path: Path) -> Verdict:
    return Verdict(**json.loads(path.read_text()), text=path.with_suffix(".txt").read_text())


def _run_child(
    folder: Path, slice_name: str, num_replicas: int, flags: tuple[str, ...], first: int
) -> UserError | None:
    """Compiles from the program numbered `first` on; what went wrong, if anything did."""
    arguments = [str(folder), slice_name, str(num_replicas), str(first), str(_LIMIT_SECONDS)]
    command = [sys.executable, "-m", "xla_b2t.xla.tpu_compiler", *arguments]
    environment = {**os.environ, **_environment(flags)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode == _UNKNOWN_SLICE:
        return UserError(f"there is no such slice: {(folder / 'unknown').read_text()}", slice_name, "try v5e:2x4")
    if child.returncode == -signal.SIGALRM:
        return UserError(
            f"the TPU's compiler did not answer within {_LIMIT_SECONDS} s", slice_name, "try a smaller bucket"
        )
    if child.returncode:
        return UserError(
            f"the TPU's compiler ended with {child.returncode}: {_last_words(child.stderr)}",
            f"compiling for {slice_name}",
            "report it with the lines above: the compiler itself failed on this program",
        )
    return None


def _environment(flags: tuple[str, ...]) -> dict[str, str]:
    return {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a compiler holds no chip
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *_FLAGS, *flags]).strip(),
    }


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check failed|F0|FATAL|Error|error", line)]
    return (telling or lines or ["it said nothing"])[-1][:400]


def _compile_all(folder: Path, slice_name: str, num_replicas: int, first: int, limit_seconds: float) -> None:
    """The child. For every program N from `first` on it writes N when it begins, then N.txt and N.json.

    Where a start or a compilation takes too long, the alarm ends the process, wherever in libtpu it is.
    """
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    import libtpu

    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name)
        devices = tuple(topology.devices[:num_replicas])
        if len(devices) < num_replicas:
            raise ValueError(f"{num_replicas} cores are needed, it has {len(devices)}")
    except Exception as error:  # the plug-in raises whatever it likes
        (folder / "unknown").write_text(str(error))
        sys.exit(_UNKNOWN_SLICE)
    for index in itertools.count(first):
        path = folder / f"{index}.hlo"
        if not path.exists():
            return
        signal.setitimer(signal.ITIMER_REAL, limit_seconds)
        (folder / str(index)).touch()
        fields = asdict(_compile(path.read_bytes(), devices))
        del fields["crash"]
        path.with_suffix(".txt").write_text(fields.pop("text"))
        path.with_suffix(".json").write_text(json.dumps(fields))


def _compile(hlo: bytes, devices: tuple) -> Verdict:
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    with mlir.make_ir_context():
        computation = _jax.mlir.xla_computation_to_mlir_module(_jax.XlaComputation(hlo))
        program = mlir.module_to_bytecode(ir.Module.parse(computation))
    options = compiler.get_compile_options(num_replicas=len(devices), num_partitions=1)
    began = time.monotonic()
    try:
        executable = devices[0].client.compile(program, xla_client.DeviceList(devices), options)
    except _jax.XlaRuntimeError as error:
        if not any(words in str(error) for words in _REFUSALS):
            raise
        return Verdict(accepted=False, refusal=str(error), seconds=time.monotonic() - began)
    memory = executable.get_compiled_memory_stats()
    return Verdict(
        accepted=True,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        text=executable.hlo_modules()[0].to_string(),
        seconds=time.monotonic() - began,
    )


if __name__ == "__main__":
    _compile_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
