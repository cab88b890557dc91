"""Decode steps that are recorded once for a number of requests and repeated from then on, as CUDA graphs.

A step in which every sequence computes one token asks the device for the same work each time, if its inputs stay where
they are (`attn_core.stores.StaticDecode`). It is recorded for a few numbers of requests; a step is padded up to the
next of these. What cannot be recorded is computed operation by operation, as any other step; `reason` says why.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import static_step
from attn_core.models import LanguageModel
from attn_core.stores import StateStore, StaticDecode, StaticStore
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from attn_engine import sequence as sequences
    from attn_engine.scheduler import ScheduledChunk

log = logging.getLogger(__name__)

Repeat = Callable[[], Tensor]
"""Computes a step again over the inputs in place; its result lies where the last one did."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of requests for which steps are recorded; above these, every multiple of `FARTHER`."""
FARTHER = 32


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


class DecodeGraphs:
    """Decode steps of a model over a store, recorded by number of requests."""

    def __init__(self, model: LanguageModel, store: StateStore, recorder: Recorder, max_num_seqs: int) -> None:
        self._model = model
        self._store = store
        self._recorder = recorder
        self._sizes = sizes_to(max_num_seqs)
        self._inputs: StaticDecode | None = None
        self._steps: dict[int, Repeat] = {}
        self.reason: str | None = None
        """Why steps are not recorded; None as long as they can be."""
        self.replayed = 0
        """Steps that were computed so."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Hidden states [sequences, hidden_size] of a decode step, valid until the next; None where it is no decode
        step, or cannot be recorded.

        Raises what a step raises that was recorded before.
        """
        if any(chunk.length != 1 or chunk.draft.tokens for chunk in chunks):
            return None
        sequences = [chunk.sequence for chunk in chunks]
        return self._repeat(sequences, [sequence.tokens[sequence.computed] for sequence in sequences])

    def run_after(self, sequences: Sequence[sequences.Sequence], rows: Sequence[int], last: Tensor) -> Tensor | None:
        """As `run`, of a step whose tokens only the device knows: these rows of `last` [tokens], int64."""
        return self._repeat(sequences, rows, last)

    def _repeat(
        self, sequences: Sequence[sequences.Sequence], tokens: Sequence[int], last: Tensor | None = None
    ) -> Tensor | None:
        if self.reason is not None or not sequences or len(sequences) > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, len(sequences))]
        if size not in self._steps and not self._record(size):
            return None
        positions = [sequence.computed for sequence in sequences]
        self._static().load(tokens, positions, [sequence.number for sequence in sequences], size, last)
        self.replayed += 1
        return self._steps[size]()[: len(sequences)]

    def record_all(self) -> None:
        """Record steps of all numbers of requests now, so that none waits for that later; the largest first, as all
        share its memory."""
        for size in reversed(self._sizes):
            if self.reason is not None or (size not in self._steps and not self._record(size)):
                return

    def _record(self, size: int) -> bool:
        """Record steps of `size` requests with one of padding alone; whether that was possible."""
        try:
            inputs = self._static()
            inputs.load((), (), (), size)
            self._steps[size] = self._recorder.record(lambda: self._compute(inputs, size))
        except NotGraphSafe as error:
            self.reason = str(error)
        except Exception as error:
            log.exception("a decode step of %d requests could not be recorded", size)
            self.reason = f"recording failed: {type(error).__name__}: {error}".split("\n", 1)[0]
        if self.reason is not None:
            log.warning("decode steps run operation by operation, without graphs: %s", self.reason)
        return self.reason is None

    def _compute(self, inputs: StaticDecode, size: int) -> Tensor:
        with static_step():
            return self._model.step(inputs.tokens(size), inputs.batch(size), inputs.view(size))

    def _static(self) -> StaticDecode:
        if self._inputs is None:
            if not isinstance(self._store, StaticStore):
                raise NotGraphSafe(f"the cache ({type(self._store).__name__}) has no inputs that stay in place")
            self._inputs = self._store.static_decode(self._sizes[-1], self._model.max_seq_len)
        return self._inputs


def sizes_to(most: int) -> tuple[int, ...]:
    """Numbers of requests for which steps are recorded where there are at most so many."""
    known = [*SIZES, *range(SIZES[-1] + FARTHER, most + FARTHER, FARTHER)]
    return (*(size for size in known if size < most), most)
