"""Fake tensors on an absent GPU: operations compute shapes, dtypes and devices, but no values.

With it a test without a GPU can check which kernels and dtypes a model would use on one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch
from attn_core.kernels import devices
from attn_core.kernels.measured import table_here
from attn_core.plugins.catalog import installed_operation
from attn_testing.laws.purity import device_guard
from pretend_cuda import H200
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations in its context: `seen` are their names with the dtypes of the tensors that they read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Record the operation and execute it."""
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        tensors = [part for part in tree_leaves((args, read)) if isinstance(part, torch.Tensor)]
        self.seen.append((func.overloadpacket.__name__, tuple(str(t.dtype).removeprefix("torch.") for t in tensors)))
        return func(*args, **(kwargs or {}))

    def dtypes(self, name: str) -> list[tuple[str, ...]]:
        """For each call of the operation with this name, the dtypes of the tensors that it reads."""
        return [dtypes for operation, dtypes in self.seen if operation == name]


@contextmanager
def fake_gpu(gpu: devices.Gpu = H200) -> Iterator[list[str]]:
    """Context manager in which fake tensors on the device "cuda" can be created and computed with.

    Gradients can be required but not computed. `Tensor.to` needs the device index too: "cuda:0". Kernels are dispatched
    as if the machine had the given GPU. Tensors have no values, and reading one raises. Yields a list to which the name
    of each launched Triton program is appended; none is executed.
    """
    started: list[str] = []
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(device_guard())
            stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
            stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda *_: True))
        for name, answer in (("get_device_capability", gpu.capability), ("get_device_name", gpu.name)):
            stack.enter_context(patch(f"torch.cuda.{name}", lambda *_, answer=answer: answer))
        stack.enter_context(patch.object(devices, "has_gpu", lambda: True))
        stack.enter_context(patch.object(devices, "nvidia_gpu", lambda: gpu))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda _: 0))
        if find_spec("triton") and find_spec("attn_kernels_triton"):
            launch = importlib.import_module("attn_kernels_triton.launch").Launch
            stack.enter_context(patch.object(launch, "run", lambda self, _: started.append(self.program.__name__)))
        for cached in (installed_operation, table_here):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield started
