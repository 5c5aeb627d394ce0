"""What all tests share: XLA on the CPU with one device, made ready before autograd starts."""

import gc
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "1")
# Tests compile much and run little: half the compile time for slower steps.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false")

import pytest


@pytest.fixture(scope="session", autouse=True)
def _xla_before_autograd(request):
    # The first backward pass of a process fixes the number of autograd's queues. If there is no XLA device by then,
    # every later backward pass on one dies with an internal assertion.
    if any("xla_device" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("xla_device")
    # What is imported by now stays; looking through it again for each test (below) would take half a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def xla_device():
    """The XLA device, on the CPU."""
    import torch_xla

    device = torch_xla.device()
    assert device.type == "xla"
    return device


@pytest.fixture(scope="session")
def small_groups(tmp_path_factory):
    """Folder of groups of 8, patches of 4 bins every 2, from 24 simulated trials of 2 sessions. Do not write to it."""
    from xla_b2t.data.prebatch import PrebatchSettings, prebatch
    from xla_b2t.data.synth import SynthSettings, synthesize

    folder = tmp_path_factory.mktemp("small")
    settings = SynthSettings(sessions=2, trials=24, features=16, seed=3, bins_per_phoneme=3.0, silence_bins=4.0)
    synthesize(folder / "trials", settings)
    groups = PrebatchSettings(num_buckets=1, patch_bins=4, patch_stride=2, group_size=8)
    prebatch(folder / "trials", folder / "groups", groups)
    return folder / "groups"


@pytest.fixture
def on_xla(xla_device):
    """A function that runs another one on the XLA device as a training step must run.

    `on_xla(function, *tensors)` copies the tensors there, traces `function` with every read of a value forbidden, and
    checks that nothing fell back to the host. It returns the results on the CPU and the text of the graph before it is
    compiled.
    """
    import torch_xla
    import torch_xla.debug.metrics as metrics

    def run(function, *tensors):
        placed = [tensor.detach().to(xla_device) for tensor in tensors]
        torch_xla.sync()
        metrics.clear_all()
        torch_xla._XLAC._set_allow_execution(False)
        try:
            results = list(function(*placed))
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        text = torch_xla._XLAC._get_xla_tensors_hlo(results)
        torch_xla.sync()
        assert not [name for name in metrics.counter_names() if name.startswith("aten::")], "fell back to the host"
        return [result.detach().cpu() for result in results], text

    return run


@pytest.fixture(autouse=True)
def _nothing_pending(request):
    # A step that was refused half-way leaves traced tensors, kept alive by its traceback: they would be compiled into
    # the next test's first graph.
    if "xla_device" in request.fixturenames:
        request.getfixturevalue("xla_device")
        import torch_xla

        gc.collect()
        torch_xla.sync(wait=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run by Pallas's interpreter; counts the calls."""
    jnp = pytest.importorskip("jax.numpy", reason="kernels need JAX, which has wheels for CPython 3.11 and 3.12")
    import numpy as np
    import torch

    from xla_b2t.xla import gru_kernel, tpu_kernel
    from xla_b2t.xla.target import V5E

    calls = []

    def call(kernel, tensors, **options):
        calls.append((kernel.__name__, *options.values()))
        arrays = [jnp.asarray(tensor.detach().cpu().float().numpy()).astype(jnp.bfloat16) for tensor in tensors]
        results = kernel(*arrays, interpret=True, **options)
        narrow = [str(result.dtype) == "bfloat16" for result in results]
        hosts = [torch.from_numpy(np.array(result.astype("float32"))) for result in results]
        return [
            (host.bfloat16() if is_narrow else host).to(tensors[0].device)
            for host, is_narrow in zip(hosts, narrow, strict=True)
        ]

    monkeypatch.setattr(tpu_kernel, "call", call)
    monkeypatch.setattr(gru_kernel, "device_kind", lambda: V5E)
    return calls
