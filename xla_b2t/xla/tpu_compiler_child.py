"""The process in which libtpu compiles (`tpu_compiler.py`), since it may take the process with it.

In: a folder with `task.json`, into which the programs N.hlo come one by one. Out: for every program N from the first on
an empty file N when it begins with it, and N.verdict when it is done; it waits for the next until it is ended. Where
libtpu does not know the slice, `unknown` says why.
"""

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xla_b2t.files import replacing
from xla_b2t.xla import compiler_dump
from xla_b2t.xla.out_of_memory import Memory, exhausted_by
from xla_b2t.xla.tracing_process import end_with_parent
from xla_b2t.xla.verdict import Verdict, packed

UNKNOWN_SLICE = 3
"""What the process ends with where libtpu does not know the slice."""

_LOOK_EVERY_SECONDS = 0.02

_UNKNOWN = re.compile(r"INVALID_ARGUMENT: .*(topology|TPU external name)", re.IGNORECASE)
"""What libtpu says of a slice that it does not know."""


@dataclass(frozen=True)
class Task:
    """What is asked.

    Attributes:
        topology, options: the slice, as libtpu has it.
        num_replicas: devices that run each program together.
        limit_seconds: for the start, and for each program.
    """

    topology: str
    options: dict[str, Any]
    num_replicas: int
    limit_seconds: float

    def write(self, folder: Path) -> None:
        """Leaves it in the folder."""
        (folder / "task.json").write_text(json.dumps(asdict(self)))


def program_file(folder: Path, index: int) -> Path:
    """Where a program is."""
    return folder / f"{index}.hlo"


def verdict_file(folder: Path, index: int) -> Path:
    """Where the verdict on a program will be."""
    return folder / f"{index}.verdict"


def main(folder: Path, first: int, parents_pipe: int) -> None:
    """Compiles from the program numbered `first` on.

    Where a start or a compilation takes too long, the alarm ends the process, wherever in libtpu it is.
    """
    end_with_parent(parents_pipe)
    task = Task(**json.loads((folder / "task.json").read_text()))
    signal.setitimer(signal.ITIMER_REAL, task.limit_seconds)
    dumped = folder / "dump"
    dumped.mkdir(exist_ok=True)
    os.environ["XLA_FLAGS"] = compiler_dump.writing_to(dumped)
    import libtpu

    os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    from jax.experimental import topologies

    try:
        devices = devices_of(task, topologies.get_topology_desc)
    except UnknownSlice as error:
        (folder / "unknown").write_text(str(error))
        sys.exit(UNKNOWN_SLICE)
    for index, program in arriving(folder, first):
        signal.setitimer(signal.ITIMER_REAL, task.limit_seconds)
        (folder / str(index)).touch()
        verdict = _compiled(program, devices, dumped)
        with replacing(verdict_file(folder, index)) as partial:
            partial.write_bytes(packed(verdict))


def arriving(folder: Path, first: int) -> Iterator[tuple[int, bytes]]:
    """The programs from the first on, each with its number, as they come. Waiting has no limit."""
    for index in itertools.count(first):
        path = program_file(folder, index)
        while not path.exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(_LOOK_EVERY_SECONDS)
        yield index, path.read_bytes()


class UnknownSlice(Exception):
    """libtpu does not know the slice, or it has too few devices."""


def devices_of(task: Task, describe: Callable[..., Any]) -> tuple:
    """The devices that run a program together.

    Args:
        task: what is asked.
        describe: JAX's `get_topology_desc`.

    Raises:
        UnknownSlice: there are none such. Whatever else the plug-in raises, as where it takes the TPU for busy, is not
            about the slice and goes on as it is.
    """
    try:
        topology = describe(platform="tpu", topology_name=task.topology, **task.options)
    except Exception as error:  # the plug-in raises whatever it likes
        if _UNKNOWN.search(str(error)):
            raise UnknownSlice(str(error)) from error
        raise
    devices = tuple(topology.devices[: task.num_replicas])
    if len(devices) < task.num_replicas:
        raise UnknownSlice(f"{task.num_replicas} devices are needed, it has {len(devices)}")
    return devices


def is_refusal(words: str) -> bool:
    """Whether an error is about the program, which needs too much of a memory of the core.

    Else it can be one that passes: threads, files and the host's memory run out by the same code.
    """
    return exhausted_by(words) in (Memory.HBM, Memory.ON_CHIP)


def _compiled(hlo: bytes, devices: tuple, dumped: Path) -> Verdict:
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    with mlir.make_ir_context():
        computation = _jax.mlir.xla_computation_to_mlir_module(_jax.XlaComputation(hlo))
        program = mlir.module_to_bytecode(ir.Module.parse(computation))
    # Which rank is which device, in order, as torch_xla says too. libtpu does not compile for several hosts without.
    places = np.array([[device.id] for device in devices])
    options = compiler.get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=places)
    compiler_dump.empty(dumped)  # of what an earlier process died on
    began = time.monotonic()
    try:
        executable = devices[0].client.compile(program, xla_client.DeviceList(devices), options)
    except _jax.XlaRuntimeError as error:
        if not is_refusal(str(error)):
            raise
        seconds = time.monotonic() - began
        text, buffers = compiler_dump.taken(dumped)
        return Verdict(accepted=False, refusal=str(error), text=text, buffers=buffers, seconds=seconds)
    seconds = time.monotonic() - began
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
        buffers=compiler_dump.taken(dumped)[1],
        seconds=seconds,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
