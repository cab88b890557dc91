"""Devices are asked of their drivers."""

import pytest

from attn_core.kernels import devices


def test_without_a_driver_there_is_no_gpu():
    assert devices.devices("libnobody_has.so.1", "cuInit", "cuDeviceGetCount") == 0
    assert devices.devices("libc.so.6", "cuInit", "cuDeviceGetCount") == 0


@pytest.mark.skipif(devices.has_gpu(), reason="there is a GPU")
def test_a_machine_without_a_gpu_has_no_name_of_one():
    assert devices.nvidia_gpu() is None


def test_the_driver_and_torch_say_the_same():
    torch = pytest.importorskip("torch")
    if torch.version.hip is not None:
        pytest.skip("of NVIDIA alone")
    seen = devices.nvidia_gpu()
    assert (seen is not None) == (torch.cuda.is_available() or devices.has_gpu())
    if seen is not None and torch.cuda.is_available():
        assert seen == (torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
