"""Host memory that the ranks of a run need, and whether this machine has it.

In: sizes of the run, and what Linux says of this machine. Out: a `HostPlan`, or an error with both figures. It is
arithmetic, and torch is not imported for it. Groups are mapped files: their pages may be dropped and are not counted.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from xla_b2t.config import Config
from xla_b2t.data.batch_plan import batches_ahead, longest_batch_bytes
from xla_b2t.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from xla_b2t.training.shapes import Shapes

PROCESS_BYTES = 700 * 10**6
"""Of a rank with torch, torch_xla, its compiled graphs and the index of the groups, as proportional set size (PSS):
695 MB was measured for each of two CPU ranks of the demo; libtpu's own share is not known."""
_GB = 1e9


@dataclass(frozen=True)
class HostPlan:
    """Bytes that a rank needs at its fullest moment, which is its start.

    Attributes:
        num_ranks: ranks on this machine.
        process_bytes: of the process without a model; the process that starts the ranks takes as much once more.
        weights_bytes: of the model, its float32 state and the narrow copy that goes to the core. A checkpoint takes
            less, and of rank 0 alone.
        prefetch_bytes: of batches that are read, wait, or are on their way to the core.
        core_bytes: of the core, where that is this machine's CPU; else 0.
    """

    num_ranks: int
    process_bytes: int
    weights_bytes: int
    prefetch_bytes: int
    core_bytes: int

    @property
    def rank_bytes(self) -> int:
        """Of one rank."""
        return self.process_bytes + self.weights_bytes + self.prefetch_bytes + self.core_bytes

    @property
    def num_bytes(self) -> int:
        """Of all ranks, and of the process that starts them."""
        return self.num_ranks * self.rank_bytes + self.process_bytes

    def rank_in_words(self) -> str:
        """What a rank needs, in GB, by what it is for."""
        parts = [("process", self.process_bytes), ("model", self.weights_bytes), ("prefetch", self.prefetch_bytes)]
        parts += [("core", self.core_bytes)] if self.core_bytes else []
        return " + ".join(f"{name} {part / _GB:.2f}" for name, part in parts)

    def in_words(self) -> str:
        """A line for the user."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{self.num_bytes / _GB:.1f} GB of host memory: {ranks} x ({self.rank_in_words()}) and their parent"


@dataclass(frozen=True)
class Available:
    """Bytes that may still be taken, and what says so."""

    num_bytes: int
    said_by: str


def plan_host(config: Config, shapes: "Shapes", model: "nn.Module", core_bytes: int = 0) -> HostPlan:
    """Adds up.

    Args:
        config: of the run.
        shapes: of the run, on this one machine.
        model: of the run, with or without values.
        core_bytes: that training needs of a core, where that is this machine's CPU; else 0.
    """
    parameters = list(model.parameters())
    num_weights = sum(tensor.numel() for tensor in (*parameters, *model.buffers()))
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    # As built, as the state begins, and as it goes to the core; one array of zeros begins both moments.
    weights_bytes = num_weights * (4 + 4 + 2 * (config.model.dtype == "bfloat16")) + num_trained * 4
    # The queue is full, as many are on their way to the core, and one is being read.
    trials = max(shapes.trials, shapes.validation_trials)
    batch_bytes = longest_batch_bytes(trials, shapes.buckets, shapes.sizes.num_features)
    prefetch_bytes = (2 * batches_ahead(config.data.prefetch_mb, batch_bytes) + 1) * batch_bytes
    return HostPlan(shapes.num_ranks, PROCESS_BYTES, weights_bytes, prefetch_bytes, core_bytes)


def check_host(plan: HostPlan, available: Available | None) -> str:
    """What is planned and what there is, in a line.

    Args:
        plan: of the run.
        available: as of `find_available`; None where that is not known.

    Raises:
        UserError: there is not enough.
    """
    if available is None:
        return f"{plan.in_words()}; not checked: neither /proc/meminfo nor a cgroup says what is available"
    has = f"{available.num_bytes / _GB:.1f} GB available ({available.said_by})"
    if plan.num_bytes <= available.num_bytes:
        return f"{plan.in_words()}; {has}"
    ranks = (available.num_bytes - plan.process_bytes) // plan.rank_bytes
    fewer = f"use --cores {ranks}" if ranks >= 1 else "use a smaller model or a smaller train.batch_size"
    raise UserError(
        f"this run needs {plan.in_words()}; there are {has}",
        available.said_by,
        f"{fewer}, lower data.prefetch_mb, or end what else runs on this machine",
    )


def find_available(root: Path = Path("/")) -> Available | None:
    """What may still be taken of this machine's memory: the least that the kernel or a cgroup of this process says.

    What can be dropped at any time, such as cached pages of files, counts as available. None where nothing says it.

    Args:
        root: holds `proc` and `sys`.
    """
    found = _of_cgroups(root)
    match = re.search(r"^MemAvailable: *(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        found.append(Available(int(match[1]) * 1024, "MemAvailable of /proc/meminfo"))
    return min(found, key=lambda available: available.num_bytes, default=None)


def _of_cgroups(root: Path) -> list[Available]:
    """Every limit on the way from this process's group to the root, version 1 or 2."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mounts, names, prefix = ("", "unified"), ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mounts, names, prefix = (controllers,), ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        # In a container the group may be named as the host sees it, and be mounted as the root.
        groups = [PurePosixPath(group), *PurePosixPath(group).parents]
        for folder in (root / "sys/fs/cgroup" / mount / str(each).lstrip("/") for mount in mounts for each in groups):
            limit, usage = (_text(folder / name).strip() for name in names)
            if limit.isdecimal() and usage.isdecimal():
                stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
                cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                left = max(0, int(limit) - max(0, int(usage) - cached))
                found.append(Available(left, f"/{(folder / names[0]).relative_to(root)}"))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # not this kind of system, or not for us to read
        return ""
