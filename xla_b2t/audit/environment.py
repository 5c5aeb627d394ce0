"""What of the environment would change a run behind its back: variables of torch_xla, and versions that are not a set.

In: the process environment, and which distributions are installed. Out: findings. torch_xla is not imported for it; its
own metadata says what it goes with. Whether there is a TPU at all is left to `xla/machine.py`.

Sources: what torch_xla 2.9.0 reads (`csrc/dtype.cpp`, `_internal/tpu.py`, `_internal/pjrt.py`); for the variables that
Kaggle presets, issues 5616 of pytorch/xla, 28204 of huggingface/transformers and 20244 of pytorch-lightning.
"""

import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from math import prod
from typing import Protocol

from xla_b2t.audit.findings import Finding

_WHERE = "environment"

CHANGE_DTYPES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG")
"""Switches after which a tensor on the core has another dtype than it says. torch_xla 2.9 still reads these three;
XLA_USE_FP16 and XLA_DOWNCAST_FP16 do nothing any more but a warning of its own."""

CHANGE_EXECUTION = ("XLA_USE_SPMD", "XLA_AUTO_SPMD", "XLA_USE_EAGER_DEBUG_MODE")
"""Switches after which a rank is no process with a core of its own, or a step no one graph."""

OF_ONE_PROCESS = ("CLOUD_TPU_TASK_ID", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "PJRT_LOCAL_PROCESS_RANK")
"""torch_xla sets them for each process of a TPU host, but not where they are set: then all take the same."""

_INSTEAD = {
    "CLOUD_TPU_TASK_ID": ("TPU_WORKER_ID", "0"),
    "TPU_PROCESS_BOUNDS": ("TPU_HOST_BOUNDS", "1,1,1"),
    "TPU_CHIPS_PER_PROCESS_BOUNDS": ("TPU_CHIPS_PER_HOST_BOUNDS", "{value}"),
}
"""What must say it instead where the machine's metadata is not asked (TPU_SKIP_MDS_QUERY): variable and value."""


class Installed(Protocol):
    """What is asked of an installed distribution, as of `importlib.metadata.Distribution`."""

    version: str
    requires: list[str] | None


def environment(
    num_ranks: int = 1,
    variables: Mapping[str, str] = os.environ,
    distribution: Callable[[str], Installed] = metadata.distribution,
) -> list[Finding]:
    """Everything about the environment that a run must not begin with.

    Args:
        num_ranks: ranks that will be started.
        variables: the environment; of a run, after `find_machine` has chosen PJRT_DEVICE.
        distribution: what is installed under a name; raises PackageNotFoundError where nothing is.
    """
    found = [_switched_on(name, variables) for name in (*CHANGE_DTYPES, *CHANGE_EXECUTION) if _is_on(name, variables)]
    if variables.get("PJRT_DEVICE") == "TPU" and num_ranks > 1:
        found += _one_host(num_ranks, variables)
    return found + _versions(distribution)


def _is_on(name: str, variables: Mapping[str, str]) -> bool:
    """As torch_xla reads a switch: `true`, or a number that is not 0; anything else is off."""
    text = variables.get(name, "")
    number = re.match(r"\s*[+-]?\d+", text)
    return text == "true" or (number is not None and int(number[0]) != 0)


def _switched_on(name: str, variables: Mapping[str, str]) -> Finding:
    return Finding("environment", name, _WHERE, repr(variables[name]), "unset", f"unset {name}")


def _one_host(num_ranks: int, variables: Mapping[str, str]) -> list[Finding]:
    """Presets that keep torch_xla from laying out the processes of one TPU host, one for each core."""
    found = []

    def refuse(name: str, value: str, expected: str) -> None:
        found.append(Finding("environment", name, _WHERE, value, expected, _unset(name, variables)))

    hosts = _listed(variables.get("TPU_WORKER_HOSTNAMES", ""))
    if len(hosts) > 1:
        fix = "take a TPU of one host, such as v5litepod-8; a slice of several is not supported"
        found.append(Finding("environment", "TPU_WORKER_HOSTNAMES", _WHERE, f"{len(hosts)} hosts", "one host", fix))
    addresses = variables.get("TPU_PROCESS_ADDRESSES")
    if addresses is not None and len(_listed(addresses)) != num_ranks:
        refuse(
            "TPU_PROCESS_ADDRESSES",
            f"{addresses!r}, {len(_listed(addresses))} of them",
            f"unset, or an address for each of the {num_ranks} processes",
        )
    for name in OF_ONE_PROCESS:
        if name in variables:
            refuse(name, f"{variables[name]!r} for all {num_ranks} processes", "unset, so that each gets its own")
    for name, expected in (("TPU_PROCESS_BOUNDS", num_ranks), ("TPU_CHIPS_PER_PROCESS_BOUNDS", 1)):
        if name in variables and _chips(variables[name]) != expected:
            what = f"a process for each of {num_ranks} cores" if expected > 1 else "one chip a process"
            refuse(name, repr(variables[name]), f"unset, or {what}")
    return found


def _unset(name: str, variables: Mapping[str, str]) -> str:
    instead, value = _INSTEAD.get(name, ("", ""))
    fix = f'unset {name}, in a notebook os.environ.pop("{name}")'
    if not instead or instead in variables or not variables.get("TPU_SKIP_MDS_QUERY"):
        return fix
    return f"export {instead}={value.format(value=variables[name])}, then {fix}"


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _chips(bounds: str) -> int:
    """Chips in bounds such as `2,4,1`; 0 where they are none."""
    parts = _listed(bounds)
    return prod(int(part) for part in parts) if parts and all(part.strip().isdigit() for part in parts) else 0


def _versions(distribution: Callable[[str], Installed]) -> list[Finding]:
    """torch is of torch_xla's minor version, and what its extras pin is of that version where it is installed."""
    torch_xla = _find("torch_xla", distribution)
    torch = _find("torch", distribution)
    if torch_xla is None:
        return [_other_version("torch_xla", "none", "one of the version of torch", "pip install torch_xla")]
    found = []
    minor = ".".join(torch_xla.version.split(".")[:2])
    version = torch.version if torch else "none"
    if version.split(".")[:2] != minor.split("."):
        fix = f"pip install 'torch=={minor}.*'"
        found.append(_other_version("torch", version, f"{minor}, as torch_xla {torch_xla.version} needs it", fix))
    for name, pinned in _pins(torch_xla.requires or []):
        other = _find(name, distribution)
        if other is not None and other.version.partition("+")[0] != pinned:
            expected = f"{pinned}, as torch_xla {torch_xla.version} needs it"
            found.append(_other_version(name, other.version, expected, f"pip install {name}=={pinned}"))
    return found


def _other_version(name: str, found: str, expected: str, fix: str) -> Finding:
    return Finding("environment", name, "installed packages", found, expected, fix)


def _pins(requires: list[str]) -> list[tuple[str, str]]:
    """(name, version) of what an extra pins: `libtpu==0.0.21; extra == "tpu"`."""
    pins = (re.fullmatch(r"([\w.-]+)\s*\(?==([\w.!+]+)\)?\s*;.*\bextra\s*==.*", text.strip()) for text in requires)
    return [(pin[1], pin[2]) for pin in pins if pin]


def _find(name: str, distribution: Callable[[str], Installed]) -> Installed | None:
    try:
        return distribution(name)
    except metadata.PackageNotFoundError:
        return None
