"""Which kind of device will run what is being traced: its lowering may differ, its mathematics not."""

from collections.abc import Iterator
from contextlib import contextmanager

V5E = "TPU v5 lite"
"""Kinds of device are named as PJRT names them."""

FEWEST_ROWS = 32
"""A tile of weights takes a TPU's matrix unit as long to load as so many rows to multiply: the schedules of our kernels
at 8 to 32 rows."""

# Of the whole process, since a backward pass is traced on a thread of autograd's own. A process that traces for a
# device that it does not have does nothing else (`xla/trace.py`).
_traced_for: list[str] = []


@contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    """What is traced meanwhile, on any thread, is meant for this kind of device, whatever the machine has."""
    _traced_for.append(kind)
    try:
        yield
    finally:
        _traced_for.pop()


def device_kind() -> str:
    """The kind of device that will run the graph, such as "TPU v5 lite" or "cpu"."""
    import torch_xla.core.xla_model as xm

    return _traced_for[-1] if _traced_for else xm.xla_device_kind()


def runs_on_tpu() -> bool:
    """Whether that is a TPU."""
    return device_kind().startswith("TPU")
