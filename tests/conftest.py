"""What all tests share: XLA on the CPU with one device, made ready before autograd starts."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "1")

import pytest


@pytest.fixture(scope="session", autouse=True)
def _xla_before_autograd(request):
    # The first backward pass of a process fixes the number of autograd's queues. If there is no XLA device by then, every
    # later backward pass on one dies with an internal assertion.
    if any("xla_device" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("xla_device")


@pytest.fixture(scope="session")
def xla_device():
    """The XLA device, on the CPU."""
    import torch_xla

    device = torch_xla.device()
    assert device.type == "xla"
    return device
