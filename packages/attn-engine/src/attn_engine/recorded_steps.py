"""Steps that are recorded once for each size and replayed from then on, as CUDA graphs.

A step launches the same work on the device each time if its inputs stay at fixed addresses. Steps are recorded for a
few sizes, and a step is padded to the next of these. Steps that cannot be recorded run eagerly, operation by operation;
`reason` says why.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import Owned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

Repeat = Callable[[], Tensor]
"""Computes a step again over its fixed inputs; the result is written to the same memory as the last one."""


SYNCHRONIZING = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount", "equal"}
)
"""Operations that make the host wait for their result."""


class ForbidHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `NotGraphSafe` for operations of this thread that wait for the device or copy between it and the host.

    A graph capture in which these occur fails, and leaves the allocator of the device in an invalid state.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it is one that must not be captured."""
        name, given = func.overloadpacket.__name__, kwargs or {}
        masks = name in {"index", "index_put_", "index_put"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in SYNCHRONIZING or masks:
            raise NotGraphSafe(f"the host waits for the device ({name})")
        result = func(*args, **given)
        if name in {"_to_copy", "to", "copy_"}:
            source = args[1] if name == "copy_" else args[0]
            if source.device != result.device:
                raise NotGraphSafe(f"data is copied from {source.device.type} to {result.device.type}")
        return result


class Recorder(Protocol):
    """Records the work that a step launches on the device."""

    def record(self, compute: Repeat) -> Repeat:
        """Return a function that repeats `compute`, which has not been called yet; raises what `compute` raises."""
        ...


class CudaRecorder:
    """Records steps as CUDA graphs that share one memory pool, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, compute: Repeat) -> Repeat:
        """See `Recorder.record`; first runs the step twice, so that kernels are compiled and libraries initialized."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            compute()
            with ForbidHostSync():  # type: ignore[no-untyped-call]
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture, for example to load a model.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()

        def repeat() -> Tensor:
            graph.replay()
            return out

        return repeat


class Rerun:
    """Computes each step eagerly over its fixed inputs, for devices without graphs."""

    def record(self, compute: Repeat) -> Repeat:
        """See `Recorder.record`."""
        compute()
        with ForbidHostSync():  # type: ignore[no-untyped-call]
            compute()
        return compute


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of steps for a device; None if the device does not support CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" and torch.version.hip is None else None


class RecordedSteps(ABC):
    """Steps of one kind, recorded by size: a step is padded to the smallest size that holds it, which is replayed."""

    steps_name: ClassVar[str]
    """The name of this kind of steps in messages."""
    size_unit: ClassVar[str]
    """The unit of a size in messages, such as tokens or requests."""

    def __init__(self, recorder: Recorder, sizes: Sequence[int]) -> None:
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._steps: dict[int, Repeat] = {}
        self.owned: Owned = {}
        """What the recorded steps read of caches that may evict it."""
        self.reason: str | None = None
        """Why steps are not recorded; None as long as they can be."""
        self.replayed = 0
        """The number of steps that were replayed."""

    @property
    def note(self) -> str | None:
        """A message that, and why, steps are not recorded; None as long as they are."""
        message = f"{self.steps_name} run eagerly, without CUDA graphs"
        return None if self.reason is None else f"{message}: {self.reason}"

    @abstractmethod
    def load_padding(self, size: int) -> None:
        """Fill the inputs of a step of this size with padding only; raises `NotGraphSafe` if it cannot be recorded."""

    @abstractmethod
    def compute(self, size: int) -> Tensor:
        """Hidden states [size, hidden_size] of a step of this size over its fixed inputs."""

    def record_all(self) -> None:
        """Record steps of all sizes now, so that no request waits for it later; the largest first, as all share its
        memory."""
        for size in reversed(self._sizes):
            if self.reason is not None or (size not in self._steps and not self._record(size)):
                return

    def ready(self, count: int) -> int | None:
        """The smallest size that holds `count` tokens or requests, recorded if it was not yet; None if it cannot be."""
        if self.reason is not None or not self._sizes or not 0 < count <= self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        return size if size in self._steps or self._record(size) else None

    def repeat(self, size: int, count: int) -> Tensor:
        """Replay the step whose inputs were loaded; its hidden states [count, hidden_size] are valid until the next."""
        self.replayed += 1
        return self._steps[size]()[:count]

    def _record(self, size: int) -> bool:
        """Record the step of a size, over inputs of padding only; returns whether that was possible."""
        try:
            self.load_padding(size)
            self._steps[size] = self._recorder.record(lambda: self.compute(size))
        except NotGraphSafe as error:
            self.reason = str(error)
        except Exception as error:
            log.exception("%s: one of %d %s could not be recorded", self.steps_name, size, self.size_unit)
            self.reason = f"recording failed: {type(error).__name__}: {error}".split("\n", 1)[0]
        if self.note is not None:
            log.warning(self.note)
        return self.reason is None
