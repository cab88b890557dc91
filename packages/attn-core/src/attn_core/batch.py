"""One engine step: tokens of many requests laid end to end, and what each request remembers.

`Tensor` is whatever tensor library the mechanism uses; the contract names shapes and imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import ASKS_FOR_LENGTHS, ASKS_THE_HOST

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Fields = Mapping[str, "Tensor"]
"""Rows of a state by field name."""


@dataclass(frozen=True)
class Span:
    """The rows `start:stop` of a ragged batch, which belong to request number `request` of the batch."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Which rows belong to whom.

    `lengths[r]` tokens of request r are computed now (1 while it decodes), after `contexts[r]` remembered
    ones. `positions` [tokens], int64, are absolute; `request_of` [tokens] and `offset_of` [tokens] locate
    each row in the padded form [requests, longest].

    Where tokens of a tree are computed side by side, each is a request of one token for itself, after what its
    ancestors and the tokens before the tree remember: who computes sees nothing else of the tree (`Tree`).
    `paths[r]` then says where the rows of its ancestors in the tree and its own lie, oldest first: places counted as
    positions are, which for a tree are not the same. It is None for a request that is no such token, and `paths` is
    empty where none is.
    """

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    positions: Tensor
    request_of: Tensor
    offset_of: Tensor
    paths: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        contexts: Sequence[int],
        tensor: Callable[[list[int]], Tensor],
        paths: Sequence[tuple[int, ...] | None] = (),
    ) -> RaggedBatch:
        """The batch of these lengths and contexts; `tensor` turns a list of integers into an int64 tensor."""
        return cls(
            lengths=tuple(lengths),
            contexts=tuple(contexts),
            positions=tensor([p for start, n in zip(contexts, lengths, strict=True) for p in range(start, start + n)]),
            request_of=tensor([r for r, n in enumerate(lengths) for _ in range(n)]),
            offset_of=tensor([i for n in lengths for i in range(n)]),
            paths=tuple(paths) if any(path is not None for path in paths) else (),
        )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.lengths)

    def path(self, request: int) -> tuple[int, ...]:
        """Where the rows of a request lie that lie elsewhere than their positions say: none but in a tree."""
        return (self.paths[request] or ()) if self.paths else ()

    def places(self, request: int) -> Sequence[int]:
        """Where the new rows of a request are to lie."""
        start = self.contexts[request]
        return self.path(request)[-1:] or range(start, start + self.lengths[request])

    def end(self, request: int) -> int:
        """The place after the last of its rows."""
        path = self.path(request)
        return path[-1] + 1 if path else self.contexts[request] + self.lengths[request]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, this step's included."""
        return max(length + context for length, context in zip(self.lengths, self.contexts, strict=True))

    @property
    def decoding(self) -> bool:
        """Whether every request computes exactly one token."""
        return all(length == 1 for length in self.lengths)

    def spans(self) -> Iterator[Span]:
        """The rows of each request, in order."""
        start = 0
        for request, length in enumerate(self.lengths):
            yield Span(request, start, start + length)
            start += length

    def single_tokens(self) -> Iterator[tuple[Span, RaggedBatch]]:
        """The requests that compute one token, each as a batch of its own."""
        for span in self.spans():
            if span.stop - span.start == 1:
                row, context = slice(span.start, span.stop), (self.contexts[span.request],)
                # Its offset is 0, and so is its number in a batch of one.
                first = self.offset_of[row]
                yield span, RaggedBatch((1,), context, self.positions[row], first, first)


class StaticBatch(RaggedBatch):
    """A decode step that is recorded once and repeated, such as a CUDA graph: one token for each of its requests.

    Its tensors stay where they are and are filled anew before each step. How much a request remembers is known on the
    device alone, so `contexts` raises `NotGraphSafe`; no request has more than `longest` tokens.
    """

    _longest: int

    def __init__(self, positions: Tensor, request_of: Tensor, offset_of: Tensor, longest: int) -> None:
        known = {"lengths": (1,) * len(positions), "positions": positions, "_longest": longest}
        for name, value in (known | {"request_of": request_of, "offset_of": offset_of}).items():
            object.__setattr__(self, name, value)

    @property
    def longest(self) -> int:
        """Tokens that no request exceeds."""
        return self._longest

    def __getattr__(self, name: str) -> Any:
        """Raise `NotGraphSafe` for what the host does not know."""
        if name == "contexts":
            raise NotGraphSafe(ASKS_THE_HOST)
        raise AttributeError(name)


class StaticMixedBatch(RaggedBatch):
    """A step with prompts that is recorded once and repeated: `positions` [tokens] of any requests, and of padding.

    Which tokens are whose is known on the device alone (`StaticMixedRows`), so whatever asks for it here raises
    `NotGraphSafe`; no request has more than `longest` tokens.
    """

    _longest: int

    def __init__(self, positions: Tensor, longest: int) -> None:
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "_longest", longest)

    @property
    def longest(self) -> int:
        """Tokens that no request exceeds."""
        return self._longest

    @property
    def decoding(self) -> bool:
        """Always False: requests may compute more than one token."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Raise `NotGraphSafe` for what the host does not know."""
        if name in {"lengths", "contexts", "request_of", "offset_of"}:
            raise NotGraphSafe(ASKS_THE_HOST if name == "contexts" else ASKS_FOR_LENGTHS)
        raise AttributeError(name)


@dataclass(frozen=True, eq=False)
class Rows:
    """Remembered rows of several requests, padded to the longest.

    Rows are in order of position and padding comes last. Of a state with a window, rows and padding may stand
    anywhere, as in a ring, and rows that the window hides from every query of the step may be among them.

    `fields[name]` is [requests, longest, ...]; `positions` [requests, longest], int64, absolute;
    `key_padding_mask` [requests, longest], bool, True where a row is real, or None if all are.
    """

    fields: Fields
    positions: Tensor
    key_padding_mask: Tensor | None


@dataclass(frozen=True, eq=False)
class RowsInPlace:
    """Where the rows of a `Paged` state lie, for kernels that read and write the memory of all requests themselves.

    `fields[name]` is that memory, [rows, ...]. `slot_mapping` [tokens], int64, are the rows of this step's tokens,
    which the kernel writes instead of calling `append`; `kv_indices` [requests, longest], int64, are each request's
    rows in order of position, this step's included, from position `firsts[request]` on, then any numbers.

    `form` is "plain" where rows lie as they were given. In "int8" a field x lies as `x.codes` [rows, ..., size] and
    `x.scale` [rows, ...], x = scale · code; in "int4" as `x.codes`, two to a byte, the first in the lower half, and
    `x.step` and `x.low` [rows, ..., size / 32], x = low + step · code.
    """

    fields: Fields
    slot_mapping: Tensor
    kv_indices: Tensor
    firsts: tuple[int, ...]
    form: str = "plain"


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticRows(RowsInPlace):
    """Rows of a `StaticBatch`: tensors that stay where they are and are filled anew before each step.

    `kv_indices` [requests, blocks], int32, are numbers of blocks of `block_size` rows each, those of a request from
    position 0 on; behind the last of its blocks, and before its window, they mean nothing. `contexts` [requests],
    int64, are how many rows each request remembers before this step's, -1 where there is no request. `firsts` is empty.
    """

    block_size: int
    contexts: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticMixedRows(RowsInPlace):
    """Rows of a `StaticMixedBatch`: tensors that stay where they are and are filled anew before each step.

    The tokens of request r are those from `query_starts[r]` to `query_starts[r + 1]`, exclusive; `query_starts`
    [requests + 1], int64. `contexts` [requests], int64, are how many rows each remembers before these, -1 where there
    is no request; the last has none and the tokens that are padding. `kv_indices` [requests, blocks] and `block_size`
    as in `StaticRows`; `firsts` is empty.
    """

    block_size: int
    contexts: Tensor
    query_starts: Tensor


class PagedView(Protocol):
    """What a layer sees of a `Paged` state in one step."""

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows, [tokens, ...] each, in batch order; call once, before reading.

        Returns the same rows as `rows` will show them: a cache may keep fewer bits of a number than it was given.

        Of a state without a window `rows` may also be called before, where this step's rows depend on earlier ones:
        then only rows at positions below the request's context mean anything, and without any there may be no fields.
        """
        ...

    def rows(self, requests: Sequence[int]) -> Rows:
        """All remembered rows, this step's included, of these requests of the batch."""
        ...


class InPlaceView(Protocol):
    """A view of a `Paged` state whose rows can be reached in memory as well."""

    def in_place(self) -> RowsInPlace | None:
        """Where the rows of all requests of the batch lie; None where they are not kept as they were given."""
        ...


class CodedInPlaceView(Protocol):
    """A view of a `Paged` state whose codes can be reached in memory."""

    def coded_in_place(self) -> RowsInPlace | None:
        """Where the codes of all requests of the batch lie, in a form that `RowsInPlace` names; None in another."""
        ...


class SlotView(Protocol):
    """What a layer sees of a `Slot` state in one step."""

    def read(self) -> Fields:
        """The state of every request of the batch, [requests, ...] each; zeros at the start of a sequence."""
        ...

    def write(self, fields: Fields) -> None:
        """Replace the state of every request of the batch, [requests, ...] each."""
        ...


@dataclass(frozen=True, eq=False)
class SlotsInPlace:
    """Where the states of a `Slot` lie, for kernels that read and replace them in the memory of all requests.

    `fields[name]` is that memory, [slots, ...]; `slots` [requests], int64, on its device, say which one each request of
    the batch has. They are different, but for those of padding in a `StaticBatch`, which share one that no request has.
    """

    fields: Fields
    slots: Tensor


class InPlaceSlotView(Protocol):
    """A view of a `Slot` state whose memory can be reached as well."""

    def in_place(self) -> SlotsInPlace | None:
        """Where the states of all requests of the batch lie; None where they may not be reached so."""
        ...


class SourceView(Protocol):
    """What a layer sees of a `Source` state in one step."""

    def rows(self, requests: Sequence[int]) -> Rows:
        """The source rows of these requests of the batch."""
        ...


LayerState = Mapping[str, Any]
"""The views of one layer's states by state name; each is the view of its spec's kind."""

ModelState = Mapping[str, LayerState]
"""The views of every layer by layer name."""
