"""Which kind of device will run what is being traced: its lowering may differ, its mathematics not."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_tracing_for_tpu: ContextVar[bool] = ContextVar("tracing_for_tpu", default=False)


@contextmanager
def tracing_for_tpu() -> Iterator[None]:
    """What is traced meanwhile is meant for a TPU, whatever this machine has."""
    token = _tracing_for_tpu.set(True)
    try:
        yield
    finally:
        _tracing_for_tpu.reset(token)


def target() -> str:
    """ "TPU" or "CPU", as torch_xla names them."""
    from torch_xla import runtime

    return "TPU" if _tracing_for_tpu.get() else runtime.device_type()
