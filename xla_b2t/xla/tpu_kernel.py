"""A Pallas kernel as one operation of the graph, and when there is one to use.

In: a function of JAX that calls Pallas, and XLA tensors. Out: XLA tensors. JAX only writes the kernel down, on any
machine: it is kept to its CPU backend, or it would open the TPU that torch_xla holds. Needs JAX (the extras `tpu` and
`tpu-compiler` bring it, for CPython 3.11 and 3.12).
"""

import functools
import importlib.util
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

# Kernels already written down, by function, shapes and dtypes: pure values, the same whoever writes them.
_written: dict[Any, tuple[str, list[tuple[int, ...]], list[torch.dtype]]] = {}
_writing = threading.Lock()


@functools.cache
def can_write() -> bool:
    """True where JAX is installed."""
    return importlib.util.find_spec("jax") is not None


def call(kernel: Callable[..., Any], tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Puts a kernel into the graph.

    Args:
        kernel: `kernel(*arrays, **options)`, a function of a module, which makes one Pallas call and returns its
            outputs as a tuple.
        tensors: XLA tensors, its arguments.
        options: hashable; part of the kernel.

    Returns:
        Its outputs.
    """
    import torch_xla

    key = (kernel, tuple((tuple(t.shape), t.dtype) for t in tensors), tuple(sorted(options.items())))
    with _writing:
        if key not in _written:
            _written[key] = _write(kernel, tensors, options)
    payload, shapes, dtypes = _written[key]
    return torch_xla._XLAC._xla_tpu_custom_call(tensors, payload, shapes, dtypes)


def _write(kernel: Callable[..., Any], tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
    import jax
    import jax.numpy as jnp
    from jax import export

    dtypes = {torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32, torch.int32: jnp.int32}
    names = {str(jnp.dtype(theirs)): ours for ours, theirs in dtypes.items()}
    arrays = [jax.ShapeDtypeStruct(tuple(tensor.shape), dtypes[tensor.dtype]) for tensor in tensors]
    jax.config.update("jax_platforms", "cpu")
    written = export.export(jax.jit(lambda *a: kernel(*a, **options)), platforms=("tpu",))(*arrays)
    outputs = written.out_avals
    payload = _payload(written.mlir_module())
    return payload, [tuple(o.shape) for o in outputs], [names[str(o.dtype)] for o in outputs]


def _payload(module: str) -> str:
    """The `backend_config` of the kernel's custom call."""
    found = re.findall(r'stablehlo\.custom_call @tpu_custom_call.*?backend_config = "((?:[^"\\]|\\.)*)"', module)
    assert len(found) == 1, f"a kernel is one Pallas call, this one has {len(found)}"
    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", _unescaped, found[0])


def _unescaped(match: re.Match) -> str:
    text = match.group(1)
    return chr(int(text, 16)) if len(text) == 2 else text
