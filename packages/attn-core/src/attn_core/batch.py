"""The input of one engine step: the concatenated tokens of many requests, and views of the state of each.

`Tensor` is that of whichever tensor library the mechanism uses; the contract only names shapes and imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from attn_core.errors import NotGraphSafe, WrongState
from attn_core.graph_safety import ASKS_FOR_LENGTHS, ASKS_THE_HOST

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Fields = Mapping[str, "Tensor"]
"""The tensors of a state by field name."""


@dataclass(frozen=True)
class Span:
    """The tokens `start:stop` of a ragged batch, which belong to request number `request` of the batch."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The layout of a batch of concatenated requests of different lengths.

    `lengths[r]` tokens of request r are computed in this step (1 while it decodes), after `contexts[r]` cached
    ones. `positions` [tokens], int64, are absolute; `request_of` [tokens] and `offset_of` [tokens] locate
    each token in the padded form [requests, longest].

    The tokens of a draft tree (`Tree`) are each a request of one token, whose context is the tokens before the tree and
    its ancestors in the tree; it attends to no other token of the tree. `paths[r]` then holds the slots of its
    ancestors in the tree and its own, oldest first. A slot is the offset of a row among the request's cached rows: it
    equals the token's position except in a tree. `paths[r]` is None for a request that is no token of a tree, and
    `paths` is empty where no request is.
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
        """Build the batch of these lengths and contexts; `tensor` turns a list of integers into an int64 tensor."""
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
        """The slots of a request that is a token of a draft tree, see `paths`; empty for any other request."""
        return (self.paths[request] or ()) if self.paths else ()

    def places(self, request: int) -> Sequence[int]:
        """The slots to which the new rows of a request are written."""
        start = self.contexts[request]
        return self.path(request)[-1:] or range(start, start + self.lengths[request])

    def end(self, request: int) -> int:
        """The slot after the last row of a request."""
        path = self.path(request)
        return path[-1] + 1 if path else self.contexts[request] + self.lengths[request]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest request, this step's included."""
        return max(length + context for length, context in zip(self.lengths, self.contexts, strict=True))

    @property
    def decoding(self) -> bool:
        """Whether every request computes exactly one token."""
        return all(length == 1 for length in self.lengths)

    def new_rows(self, every: int) -> list[range]:
        """The rows that each request adds to a state with one row per `every` tokens: those that this step completes.

        Raises `WrongState` for the tokens of a draft tree, whose blocks of tokens are not those of the sequence.
        """
        if self.paths:
            raise WrongState("tokens of a draft tree cannot complete rows of several tokens")
        return [range(c // every, (c + n) // every) for c, n in zip(self.contexts, self.lengths, strict=True)]

    def spans(self) -> Iterator[Span]:
        """The span of each request, in order."""
        start = 0
        for request, length in enumerate(self.lengths):
            yield Span(request, start, start + length)
            start += length

    def single_tokens(self) -> Iterator[tuple[Span, RaggedBatch]]:
        """The requests that compute one token: the span of each, and a batch of it alone."""
        for span in self.spans():
            if span.stop - span.start == 1:
                row, context = slice(span.start, span.stop), (self.contexts[span.request],)
                # In a batch of one token both its offset and its request number are 0.
                first = self.offset_of[row]
                yield span, RaggedBatch((1,), context, self.positions[row], first, first)


class StaticBatch(RaggedBatch):
    """The batch of a step that is recorded once and replayed, such as a CUDA graph: `positions` [tokens], padding
    included.

    Its tensors keep their addresses and are refilled before each step. No request computes more than `max_query_len`
    tokens or has more than `longest` in all. Context lengths are known only on the device, and so is which tokens
    belong to which request (`StaticRows`), except in decode steps (`max_query_len` 1), where each token is a request
    and `request_of` [tokens] counts them: reading what is unknown raises `NotGraphSafe`.
    """

    max_query_len: int
    _longest: int

    def __init__(self, positions: Tensor, longest: int, max_query_len: int, request_of: Tensor | None = None) -> None:
        known = {"positions": positions, "_longest": longest, "max_query_len": max_query_len}
        if max_query_len == 1:
            known |= {"lengths": (1,) * len(positions), "request_of": request_of}
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @property
    def longest(self) -> int:
        """Upper bound of the tokens of any request."""
        return self._longest

    @property
    def decoding(self) -> bool:
        """Whether every request computes exactly one token."""
        return self.max_query_len == 1

    def __getattr__(self, name: str) -> Any:
        """Raise `NotGraphSafe` for the fields that are known only on the device."""
        if name in {"lengths", "contexts", "request_of", "offset_of"}:
            raise NotGraphSafe(ASKS_THE_HOST if name == "contexts" else ASKS_FOR_LENGTHS)
        raise AttributeError(name)


@dataclass(frozen=True, eq=False)
class Rows:
    """Cached rows of several requests, padded to the longest.

    Rows are in order of position and padding comes last; the position of a row for several tokens is that of the last
    of them. For a state with a window, rows and padding may be in any
    order, as in a ring buffer, and may include rows that the window hides from every query of the step.

    `fields[name]` is [requests, longest, ...]; `positions` [requests, longest], int64, are absolute;
    `key_padding_mask` [requests, longest], bool, True where a row is real, or None if all are.
    """

    fields: Fields
    positions: Tensor
    key_padding_mask: Tensor | None


@dataclass(frozen=True, eq=False)
class RowsInPlace:
    """The memory of a `Paged` state, for kernels that read and write the cached rows of all requests themselves.

    `fields[name]` is that memory, [rows, ...]. `slot_mapping` [tokens], int64, are the rows of this step's tokens,
    which the kernel writes instead of calling `append`; `kv_indices` [requests, longest], int64, are each request's
    rows in order of position, this step's included, from position `firsts[request]` on, followed by arbitrary numbers.

    `form` is "plain" where rows are stored as they were given. In "float16" a field x is stored as `x.codes`, the
    nearest float16 numbers. In "int8" a field x is stored as `x.codes` [rows, ...,
    size] and `x.scale` [rows, ...], x = scale · code; in "int4" as `x.codes`, two to a byte, the first in the lower
    half, and `x.step` and `x.low` [rows, ..., size / 32], x = low + step · code.
    """

    fields: Fields
    slot_mapping: Tensor
    kv_indices: Tensor
    firsts: tuple[int, ...]
    form: str = "plain"

    def of(self, name: str, numbers: Tensor) -> Tensor:
        """The rows of a field at `numbers` [row], not copied where they lie one behind the other."""
        field: Tensor = self.fields[name]
        if len(numbers) and bool((numbers[1:] - numbers[:-1] == 1).all()):
            return field[int(numbers[0]) : int(numbers[0]) + len(numbers)]
        return field.index_select(0, numbers)


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticRows(RowsInPlace):
    """The cached rows of a `StaticBatch`: tensors that keep their addresses and are refilled before each step.

    For up to R requests of at most `max_query_len` tokens each, in a decode step (`max_query_len` 1) for as many as the
    step has tokens. The tokens of request r are those from `query_starts[r]` to `query_starts[r + 1]`, exclusive;
    `query_starts` [R + 2], int64. `contexts` [R + 1], int64, are the numbers of rows cached before these tokens, -1 if
    there is no request; the last entry is no request and takes the padding tokens. `kv_indices` [R, blocks], int32, is
    a block table: the blocks of `block_size` rows that store a request from position 0 on; entries after its last
    block, and before its window, are undefined. `firsts` is empty.
    """

    block_size: int
    contexts: Tensor
    query_starts: Tensor
    max_query_len: int


class PagedView(Protocol):
    """A layer's view of a `Paged` state in one step."""

    def append(self, fields: Fields) -> Fields:
        """Store this step's rows, [tokens, ...] each, in batch order; call once, before reading.

        For a state with a row per several tokens, the rows are those of `RaggedBatch.new_rows`, possibly none.

        Returns the same rows as `rows` will return them: a cache may store numbers in fewer bits than it was given.

        For a state without a window, `rows` may also be called before, where this step's rows depend on earlier ones:
        then only rows at positions below the request's context are valid, and where there are none, the fields may be
        missing.
        """
        ...

    def rows(self, requests: Sequence[int]) -> Rows:
        """All cached rows, this step's included, of these requests of the batch."""
        ...


class InPlaceView(Protocol):
    """A view of a `Paged` state that also gives access to the cache's memory."""

    def in_place(self) -> RowsInPlace | None:
        """The stored rows of all requests of the batch; None where rows are not stored as they were given."""
        ...


class CodedInPlaceView(Protocol):
    """A view of a `Paged` state that gives access to quantized codes in the cache's memory."""

    def coded_in_place(self) -> RowsInPlace | None:
        """The stored codes of all requests of the batch; None where their form is not one of `RowsInPlace.form`."""
        ...


class SlotView(Protocol):
    """A layer's view of a `Slot` state in one step."""

    def read(self) -> Fields:
        """The state of every request of the batch, [requests, ...] each; zeros at the start of a sequence."""
        ...

    def write(self, fields: Fields) -> None:
        """Replace the state of every request of the batch, [requests, ...] each."""
        ...


@dataclass(frozen=True, eq=False)
class SlotsInPlace:
    """The memory of a `Slot` state, for kernels that read and replace the states of all requests in place.

    `fields[name]` is that memory, [slots, ...]; `slots` [requests], int64, on its device, are the slots of the requests
    of the batch. They are distinct, except that padding in a `StaticBatch` shares one slot that no request has.
    """

    fields: Fields
    slots: Tensor


class InPlaceSlotView(Protocol):
    """A view of a `Slot` state that also gives access to the cache's memory."""

    def in_place(self) -> SlotsInPlace | None:
        """The stored states of all requests of the batch; None where the store gives no access to them."""
        ...


class SourceView(Protocol):
    """A layer's view of a `Source` state in one step."""

    def rows(self, requests: Sequence[int]) -> Rows:
        """The source rows of these requests of the batch."""
        ...


LayerState = Mapping[str, Any]
"""The views of one layer's states by state name: a `PagedView`, `SlotView` or `SourceView`, as the state's spec is."""

ModelState = Mapping[str, LayerState]
"""The views of every layer's states by layer name."""
