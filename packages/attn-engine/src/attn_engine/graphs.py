"""Steps that are recorded once for each size and replayed from then on, as CUDA graphs.

A step launches the same work on the device each time if its inputs stay at fixed addresses
(`attn_core.stores.StaticStep`). Steps are recorded for a few numbers of tokens, and a step is padded to the next of
these. A decode step is a step whose requests have one token each. Steps that cannot be recorded run eagerly, operation
by operation; `StepGraphs.reasons` says why.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import Owned, static_step
from attn_core.models import LanguageModel
from attn_core.stores import StateStore, StaticStep, StaticStore
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from attn_engine import sequence as sequences
    from attn_engine.scheduler import ScheduledChunk

log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""The numbers of tokens for which decode steps are recorded; beyond the last one, in increments of
`DECODE_INCREMENT`."""
DECODE_INCREMENT = 32
MIN_TOKENS = 16
"""The number of tokens of the smallest recorded step with prompts, and the smallest difference between two sizes."""

DECODE, PROMPTS = "decode steps", "steps with prompts"
"""The kinds of recorded steps: those whose requests have one token each, and those whose requests have any number."""

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


class StepLimits(NamedTuple):
    """The maximum numbers of tokens and of requests of a recorded step with prompts; 0 tokens: only decode steps are
    recorded."""

    tokens: int
    requests: int


class StepGraph(NamedTuple):
    """A recorded step, and what it reads of caches that may evict it."""

    repeat: Repeat
    owned: Owned


class StepGraphs:
    """The steps of a model over a store, recorded by kind and number of tokens.

    A step is padded to the smallest size that holds it, which is replayed. `reasons` says, by kind, why steps are not
    recorded; nothing as long as they can be. `replayed` counts the steps that were replayed.
    """

    def __init__(self, model: LanguageModel, store: StateStore, recorder: Recorder, limits: StepLimits) -> None:
        self._model = model
        self._store = store
        self._recorder = recorder
        self._limits = limits
        self._sizes = {PROMPTS: prompt_sizes(limits.tokens), DECODE: decode_sizes(limits.requests)}
        self._graphs: dict[tuple[str, int], StepGraph] = {}
        self._inputs: StaticStep | None = None
        self.reasons: dict[str, str] = {}
        self.replayed: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """A message for each kind of steps that are not recorded, with the reason."""
        return [f"{kind} run eagerly, without CUDA graphs: {reason}" for kind, reason in self.reasons.items()]

    def record_all(self) -> None:
        """Record steps of all kinds and sizes now, so that no request waits for it later; the largest first, as all
        share its memory."""
        for kind, sizes in self._sizes.items():
            for size in reversed(sizes):
                self._recorded(kind, size)

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Hidden states [tokens, hidden_size] of a step, valid until the next step.

        None if the step cannot be recorded or exceeds the limits. Raises whatever replaying a recorded step raises.
        """
        if any(chunk.draft.is_tree for chunk in chunks):
            return None
        tokens = list[int]()
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            tokens += chunk.draft.tokens
        sequences, lengths = [chunk.sequence for chunk in chunks], [chunk.rows for chunk in chunks]
        return self._replay(sequences, lengths, tokens)

    def run_after(self, sequences: Sequence[sequences.Sequence], rows: Sequence[int], last: Tensor) -> Tensor | None:
        """Like `run`, for a decode step whose input tokens are known only to the device: `rows` of `last` [tokens],
        int64."""
        return self._replay(sequences, [1] * len(sequences), rows, last)

    def _replay(
        self,
        sequences: Sequence[sequences.Sequence],
        lengths: Sequence[int],
        tokens: Sequence[int],
        last: Tensor | None = None,
    ) -> Tensor | None:
        kind = DECODE if len(tokens) == len(sequences) else PROMPTS
        sizes = self._sizes[kind]
        if len(sequences) > self._limits.requests or not sizes or not 0 < len(tokens) <= sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, len(tokens))]
        graph = self._recorded(kind, size)
        if graph is None:
            return None
        contexts, names = [one.computed for one in sequences], [one.number for one in sequences]
        self.inputs.load(tokens, contexts, lengths, names, size, last)
        self.replayed[kind] += 1
        return graph.repeat()[: len(tokens)]

    def _recorded(self, kind: str, size: int) -> StepGraph | None:
        """The graph of a step of this size, recorded over inputs of padding only if it was not yet; None if it cannot
        be."""
        if (kind, size) in self._graphs or kind in self.reasons:
            return self._graphs.get((kind, size))
        owned: Owned = {}
        try:
            self.inputs.load((), (), (), (), size)
            repeat = self._recorder.record(lambda: self._compute(size, 1 if kind == DECODE else size, owned))
        except NotGraphSafe as error:
            self.reasons[kind] = str(error)
        except Exception as error:
            log.exception("%s: one of %d tokens could not be recorded", kind, size)
            self.reasons[kind] = f"recording failed: {type(error).__name__}: {error}".split("\n", 1)[0]
        else:
            self._graphs[kind, size] = StepGraph(repeat, owned)
            return self._graphs[kind, size]
        log.warning(self.notes[-1])
        return None

    def _compute(self, size: int, max_query_len: int, owned: Owned) -> Tensor:
        """Hidden states [size, hidden_size] of a step over its fixed inputs."""
        batch, views = self.inputs.batch(size, max_query_len), self.inputs.view(size, max_query_len)
        with static_step(owned):
            return self._model.step(self.inputs.tokens(size), batch, views)

    @property
    def inputs(self) -> StaticStep:
        """The inputs of all recorded steps; raises `NotGraphSafe` if they cannot be at fixed addresses."""
        if self._inputs is None:
            if not isinstance(self._store, StaticStore):
                raise NotGraphSafe(f"the cache ({type(self._store).__name__}) has no input buffers at fixed addresses")
            tokens, requests = self._limits
            self._inputs = self._store.static_step(max(tokens, requests), requests, self._model.max_seq_len)
        return self._inputs


def decode_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens, up to `most`, for which decode steps are recorded."""
    known = [*DECODE_SIZES, *range(DECODE_SIZES[-1] + DECODE_INCREMENT, most + DECODE_INCREMENT, DECODE_INCREMENT)]
    return (*(size for size in known if size < most), most)


def prompt_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens, up to `most`, for which steps with prompts are recorded: each is at most a quarter, or
    `MIN_TOKENS` tokens, larger than the one before."""
    found, size = list[int](), MIN_TOKENS
    while size < most:
        found.append(size)
        size += max(MIN_TOKENS, 1 << (size.bit_length() - 3))
    return (*found, most) if most else ()
