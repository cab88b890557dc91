"""State stores: the contract between the engine, which owns the memory of states, and a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from attn_core.batch import Fields, ModelState, RaggedBatch, StaticBatch
from attn_core.errors import InvalidValue
from attn_core.states import Paged, Slot, StateSpecs, state_bytes

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

ModelSpecs = Mapping[str, StateSpecs]
"""The state specs of every layer by layer name."""


@dataclass(frozen=True, kw_only=True)
class StoreSize:
    """The capacity of a store: `tokens` tokens of all requests together, of at most `requests` requests at a time."""

    tokens: int
    requests: int
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for field in ("tokens", "requests"):
            if getattr(self, field) < 1:
                raise InvalidValue.of(field, getattr(self, field), "a whole number from 1")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How much of a store's capacity is used."""

    tokens: int
    tokens_total: int
    requests: int
    requests_total: int


class StateStore(Protocol):
    """The states of all running requests. The engine names each request by an integer of its choice."""

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens fits into an otherwise empty store."""
        ...

    def admit(self, request: int) -> bool:
        """Add an empty request; False, changing nothing, if there is no room."""
        ...

    def reserve(self, request: int, tokens: int) -> bool:
        """Reserve room for positions up to `tokens`, exclusive; False, changing nothing, if there is none."""
        ...

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Write the source states, layer -> state -> field [source, ...], once after `admit`."""
        ...

    def release(self, request: int) -> None:
        """Remove the request and free everything it holds."""
        ...

    def order(self, requests: Sequence[int]) -> list[int]:
        """Sort requests into the order in which a batch of them is cheapest to read."""
        ...

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """The views of all states for one step; `requests[r]` is the name of request r of the batch."""
        ...

    def live_bytes(self, request: int, tokens: int) -> int:
        """Bytes of the tensors of a request of `tokens` tokens in the store, without unused capacity."""
        ...

    def usage(self) -> Usage:
        """The capacity in use now."""
        ...


@runtime_checkable
class PrefixStore(Protocol):
    """A store with prefix caching: a prefix that several requests share is computed only once.

    Whole blocks of tokens are shared; a `scope` is any text, and nothing is shared between two scopes.
    """

    def adopt(self, request: int, tokens: Sequence[int], scope: str) -> int:
        """Give a newly admitted request the states of the longest cached prefix of `tokens`; returns its length."""
        ...

    def remember(self, request: int, tokens: Sequence[int], computed: int, scope: str) -> None:
        """Cache the states of the request's whole blocks, of which the first `computed` tokens are computed.

        `tokens` may be longer than that and the same list at every call: only the new part of it is read.
        """
        ...

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """How many of the next `length` tokens to compute in one step, for states that only exist at the end of a step.

        `prompt` is the length of a prefix that is to be cached, 0 where none is.
        """
        ...


@runtime_checkable
class BranchingStore(Protocol):
    """A store whose requests can be forked and rewound, such as for beam search and speculative decoding."""

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether this many requests of this many tokens each fit together into an otherwise empty store."""
        ...

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """Add `copy` with the states of `request`, computed up to `tokens`; False, changing nothing, without room.

        Both requests are independent afterwards: neither writes to memory that they share.
        """
        ...

    def mark(self, request: int, tokens: int) -> None:
        """Allow `rewind` to `tokens`, up to which the request is computed, or to later ones; replaces the last mark."""
        ...

    def rewind(self, request: int, tokens: int) -> int:
        """Drop what was computed from position `tokens` on, which is no earlier than the last mark.

        Returns how many tokens are left: `tokens`, or those at the mark for states that only exist at the end of a
        step.
        """
        ...


@runtime_checkable
class TreeStore(Protocol):
    """A store that can hold the tokens of a draft tree after the context of a request (`RaggedBatch.paths`).

    `view` then takes the request's name for each of the tree's tokens; room for all of them must be reserved.
    """

    def tree_unsupported_reason(self) -> str | None:
        """Why this store cannot hold draft trees, as text for users; None if it can."""
        ...

    def accept_path(self, request: int, tokens: int, slots: Sequence[int]) -> None:
        """Keep the rows at these slots, an ascending path of a draft tree, as those after the first `tokens` tokens.

        The rest of the tree is dropped. Raises `WrongState` where `tree_unsupported_reason` gives a reason.
        """
        ...


@runtime_checkable
class PortableStore(Protocol):
    """A store that exports requests as bytes, to continue in another store of the same states and element type."""

    def export(self, request: int, tokens: int) -> bytes:
        """Export all states that the token after the first `tokens` reads; `tokens` are those that are computed.

        A safetensors file: for a window its last `window - 1` rows, else every row. Every kind of store that keeps rows
        unchanged gives the same bytes. They do not identify the model, except by the shapes of its states.
        Raises `WrongState` for tokens that are not computed, `Incompatible` from a store that cannot export.
        """
        ...

    def restore(self, request: int, exported: bytes) -> int:
        """Admit `request` with exported states; returns how many of its tokens are computed.

        Changes nothing when it raises: `StateInvalid` for bytes that are damaged or of other states, `Incompatible`
        for more tokens than the store can ever hold, `OutOfCapacity` without room now, `AlreadyExists` for a name in
        use.
        """
        ...


class StaticStep(Protocol):
    """The inputs of steps in memory of fixed addresses, for steps that are recorded once and replayed.

    A step has `size` tokens, of which the last may be padding: their outputs are ignored, and they write to memory that
    is never read. In steps with `max_query_len` 1 each token is a request of its own.
    """

    def load(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int],
        lengths: Sequence[int],
        names: Sequence[int],
        size: int,
        last: Tensor | None = None,
    ) -> None:
        """Fill the inputs of the next step with one copy to the device: `lengths[r]` tokens of the request called
        `names[r]`, after `contexts[r]` cached ones, concatenated in `tokens`, and padding up to `size`.

        With `last` [rows], int64, on the device, `tokens` are indices into it: it holds the tokens of a step that may
        still run. Token id 0 replaces a negative token there.

        Raises `WrongState` where a position is not reserved.
        """
        ...

    def tokens(self, size: int) -> Tensor:
        """The tokens of a step [size], int64."""
        ...

    def batch(self, size: int, max_query_len: int) -> StaticBatch:
        """A batch over these inputs; new at every call, because what layers cache for a batch is valid for one run."""
        ...

    def view(self, size: int, max_query_len: int) -> ModelState:
        """The views of a step; of a `PagedView`, `rows` raises `NotGraphSafe` and `in_place` returns `StaticRows`.

        Raises `NotGraphSafe` where a state does not allow that many tokens of a request.
        """
        ...


@runtime_checkable
class StaticStore(Protocol):
    """A store whose steps can be recorded once and replayed."""

    def static_step(self, tokens: int, requests: int, longest: int) -> StaticStep:
        """Allocate the inputs of steps of at most `tokens` tokens of at most `requests` requests, which have at most
        `longest` tokens each.

        Raises `NotGraphSafe` where a state, or the way in which the store keeps it, does not allow that.
        """
        ...


class CacheFamily(ABC):
    """A kind of store that a plugin offers by name.

    `loss` is the largest error of a number that is read back, relative to the largest magnitude that was written to
    its field; 0 where rows are read as they were written. `portable` says whether each of its stores is a
    `PortableStore`, so that a request can continue in a store of another process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    loss: ClassVar[float] = 0.0
    portable: ClassVar[bool] = False

    @abstractmethod
    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """Create an empty store for a model with these states."""

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """Bytes of one request of `tokens` tokens and `source` source tokens in a store of this kind."""
        return sum(state_bytes(states, tokens=tokens, source=source, dtype=dtype) for states in specs.values())

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """Bytes of a full store of this size, without source states; states of each window have `size.tokens` rows.

        States of fixed size have one slot more than there are requests, for the padding of static steps.
        """
        states = [spec for layer in specs.values() for spec in layer.values()]
        rows = sum(spec.row_bytes(size.dtype) * size.tokens // spec.every for spec in states if isinstance(spec, Paged))
        fixed = sum(spec.row_bytes(size.dtype) for spec in states if isinstance(spec, Slot))
        return rows + fixed * (size.requests + 1)
