"""Steps that are recorded once for a size and repeated from then on, as CUDA graphs.

A step asks the device for the same work each time, if its inputs stay where they are. It is recorded for a few sizes;
a step is padded up to the next of these. What cannot be recorded is computed operation by operation, as any other step;
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

Repeat = Callable[[], Tensor]
"""Computes a step again over the inputs in place; its result lies where the last one did."""


WAITING = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount", "equal"}
)
"""Operations for the result of which the host waits."""


class NothingOfTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `NotGraphSafe` for operations of this thread that wait for the device or bring it something: a recording
    in which these occur fails, and leaves the memory of the device in disorder."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, unless it is such an operation."""
        name, given = func.overloadpacket.__name__, kwargs or {}
        masks = name in {"index", "index_put_", "index_put"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING or masks:
            raise NotGraphSafe(f"the host waits for the device ({name})")
        result = func(*args, **given)
        if name in {"_to_copy", "to", "copy_"}:
            source = args[1] if name == "copy_" else args[0]
            if source.device != result.device:
                raise NotGraphSafe(f"numbers are copied from {source.device.type} to {result.device.type}")
        return result


class Recorder(Protocol):
    """Records what a step asks of the device."""

    def record(self, compute: Repeat) -> Repeat:
        """What repeats `compute`, which has not been called yet; raises what it raises."""
        ...


class CudaRecorder:
    """Records steps as CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, compute: Repeat) -> Repeat:
        """See `Recorder.record`; computes the step twice before, so that kernels are compiled and libraries ready."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            compute()
            with NothingOfTheHost():  # type: ignore[no-untyped-call]
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, to load a model say.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()

        def repeat() -> Tensor:
            graph.replay()
            return out

        return repeat


class Rerun:
    """Computes each step anew, over inputs in place: for devices without graphs."""

    def record(self, compute: Repeat) -> Repeat:
        """See `Recorder.record`."""
        compute()
        with NothingOfTheHost():  # type: ignore[no-untyped-call]
            compute()
        return compute


def recorder_for(device: torch.device) -> Recorder | None:
    """What records steps on a device; None where operations are computed one by one anyway."""
    return CudaRecorder(device) if device.type == "cuda" and torch.version.hip is None else None


class RecordedSteps(ABC):
    """Steps of one kind, recorded by size: the smallest that holds a step is repeated, with padding."""

    kinds: ClassVar[str]
    """What these steps are called, for people."""
    counted: ClassVar[str]
    """Of what a size is a number."""

    def __init__(self, recorder: Recorder, sizes: Sequence[int]) -> None:
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._steps: dict[int, Repeat] = {}
        self.reason: str | None = None
        """Why steps are not recorded; None as long as they can be."""
        self.replayed = 0
        """Steps that were computed so."""

    @property
    def note(self) -> str | None:
        """What is said of steps that are not recorded; None as long as they are."""
        said = f"{self.kinds} run operation by operation, without graphs"
        return None if self.reason is None else f"{said}: {self.reason}"

    @abstractmethod
    def load_padding(self, size: int) -> None:
        """Fill the inputs of a step of this size with padding alone; raises `NotGraphSafe` where there can be none."""

    @abstractmethod
    def compute(self, size: int) -> Tensor:
        """Hidden states of a step of this size over the inputs in place."""

    def record_all(self) -> None:
        """Record steps of all sizes now, so that none waits for that later; the largest first, as all share its
        memory."""
        for size in reversed(self._sizes):
            if self.reason is not None or (size not in self._steps and not self._record(size)):
                return

    def ready(self, count: int) -> int | None:
        """The size whose step holds so many, recorded; None where it cannot be."""
        if self.reason is not None or not self._sizes or not 0 < count <= self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        return size if size in self._steps or self._record(size) else None

    def repeat(self, size: int, count: int) -> Tensor:
        """Hidden states [count, hidden_size] of the step whose inputs were loaded, valid until the next."""
        self.replayed += 1
        return self._steps[size]()[:count]

    def _record(self, size: int) -> bool:
        """Record steps of a size with one of padding alone; whether that was possible."""
        try:
            self.load_padding(size)
            self._steps[size] = self._recorder.record(lambda: self.compute(size))
        except NotGraphSafe as error:
            self.reason = str(error)
        except Exception as error:
            log.exception("%s: one of %d %s could not be recorded", self.kinds, size, self.counted)
            self.reason = f"recording failed: {type(error).__name__}: {error}".split("\n", 1)[0]
        if self.note is not None:
            log.warning(self.note)
        return self.reason is None
