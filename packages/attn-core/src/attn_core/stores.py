"""Memory for states, owned by the engine: the contract a cache keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from attn_core.batch import Fields, ModelState, RaggedBatch, StaticBatch, StaticMixedBatch
from attn_core.errors import InvalidValue
from attn_core.states import Paged, Slot, StateSpecs, state_bytes

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

ModelSpecs = Mapping[str, StateSpecs]
"""The states of every layer by layer name."""


@dataclass(frozen=True, kw_only=True)
class StoreSize:
    """How much a store holds: `tokens` of all requests together, at most `requests` at a time."""

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
    """What is taken of a store."""

    tokens: int
    tokens_total: int
    requests: int
    requests_total: int


class StateStore(Protocol):
    """All states of all running requests. Requests are named by any integer the engine likes."""

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens could be held by an otherwise empty store."""
        ...

    def admit(self, request: int) -> bool:
        """Open an empty request; False, changing nothing, if there is no place."""
        ...

    def reserve(self, request: int, tokens: int) -> bool:
        """Make room for positions up to `tokens`, exclusive; False, changing nothing, if there is none."""
        ...

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Fill the source states, layer -> state -> field [source, ...], once after `admit`."""
        ...

    def release(self, request: int) -> None:
        """Free everything the request holds."""
        ...

    def order(self, requests: Sequence[int]) -> list[int]:
        """The same requests in the order in which a batch of them is cheapest to read."""
        ...

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """The views of one step; `requests[r]` is the name of request r of the batch."""
        ...

    def live_bytes(self, request: int, tokens: int) -> int:
        """Bytes of the tensors that a request of `tokens` tokens has in the store, without slack."""
        ...

    def usage(self) -> Usage:
        """What is taken now."""
        ...


@runtime_checkable
class PrefixStore(Protocol):
    """A store in which requests that begin alike need compute what they share only once.

    What is shared are blocks of whole tokens; a `scope` is any text, and nothing is shared between two scopes.
    """

    def adopt(self, request: int, tokens: Sequence[int], scope: str) -> int:
        """Give a request, just admitted, the remembered states of the longest beginning of `tokens`; its length."""
        ...

    def remember(self, request: int, tokens: Sequence[int], computed: int, scope: str) -> None:
        """Remember the states of the request's whole blocks, now that those of its first `computed` tokens exist.

        `tokens` may be more than those and the same list at every call: of a request only what is new is read.
        """
        ...

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """How many of the next `length` tokens to compute at once, for states that exist only where a step ends.

        `prompt` is the length of a beginning that is to be remembered, 0 where nothing is.
        """
        ...


@runtime_checkable
class BranchingStore(Protocol):
    """A store in which a request can be continued in several ways, and be taken back."""

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether so many requests of this many tokens each could be held together by an otherwise empty store."""
        ...

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """Open `copy` with the states of `request`, computed up to `tokens`; False, changing nothing, without room.

        Either may go on alone afterwards: what both hold is written by neither.
        """
        ...

    def mark(self, request: int, tokens: int) -> None:
        """Note that the request, computed up to `tokens`, may come back to here or later; replaces its last mark."""
        ...

    def rewind(self, request: int, tokens: int) -> int:
        """Forget what was computed from position `tokens` on, which is no earlier than the last mark.

        How many tokens are left: `tokens`, or those at the mark where a state exists only where a step ended.
        """
        ...


@runtime_checkable
class TreeStore(Protocol):
    """A store that can hold the tokens of a tree behind what a request remembers (`RaggedBatch.paths`).

    `view` then takes the request's name for each of the tree's tokens; room for all of them must be reserved.
    """

    def tree_unsupported_reason(self) -> str | None:
        """Why it cannot, for people: what is remembered exists once a request, say; None if it can."""
        ...

    def accept_path(self, request: int, tokens: int, slots: Sequence[int]) -> None:
        """Keep the rows at these slots, an ascending path of a draft tree, as those after the first `tokens` tokens.

        The rest of the tree is dropped. Raises `WrongState` where `tree_unsupported_reason` says why.
        """
        ...


@runtime_checkable
class PortableStore(Protocol):
    """A store whose requests can leave it as bytes and go on in another store of the same states and element type."""

    def export(self, request: int, tokens: int) -> bytes:
        """All that the token after the first `tokens`, which are what is computed, reads of the request.

        A safetensors file: of a window its last `window - 1` rows, else every row. The same bytes from every kind of
        store that keeps rows as they are. Which model wrote them is not in them, beyond the shape of its states.
        Raises `WrongState` for tokens that are not computed, `Incompatible` from a store that cannot.
        """
        ...

    def restore(self, request: int, exported: bytes) -> int:
        """Admit `request` with the states that were exported; how many tokens of it are computed.

        Changes nothing when it raises: `StateInvalid` for bytes that are damaged or of other states, `Incompatible`
        for more tokens than the store ever holds, `OutOfCapacity` without room now, `AlreadyExists` for a name in use.
        """
        ...


class StaticDecode(Protocol):
    """The inputs of decode steps in memory that stays where it is, for steps that are recorded once and repeated.

    A step has `requests` requests, of which the last may be padding: they compute something that nobody reads, and
    write where nobody reads.
    """

    def load(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        names: Sequence[int],
        requests: int,
        last: Tensor | None = None,
    ) -> None:
        """Fill the inputs of the next step with one copy to the device: the requests of these names, each with the
        token at a position that is the first not computed, and padding up to `requests`.

        With `last` [rows], int64, on the device, `tokens` are rows of it: the tokens of a step that may still run. The
        first token stands for one that is negative there.

        Raises `WrongState` where a position is not reserved.
        """
        ...

    def tokens(self, requests: int) -> Tensor:
        """The tokens [requests], int64."""
        ...

    def batch(self, requests: int) -> StaticBatch:
        """A batch over these inputs; a new one at every call, as what layers keep by batch holds for one run."""
        ...

    def view(self, requests: int) -> ModelState:
        """The views of a step; `rows` of a `Paged` one raises `NotGraphSafe`, `in_place` gives `StaticRows`."""
        ...


@runtime_checkable
class StaticStore(Protocol):
    """A store whose decode steps can be recorded once and repeated."""

    def static_decode(self, requests: int, longest: int) -> StaticDecode:
        """The inputs of steps of at most `requests` requests, of at most `longest` tokens each.

        Raises `NotGraphSafe` where a state of the store, or its way of keeping it, does not allow that.
        """
        ...


class StaticMixed(Protocol):
    """The inputs of steps with prompts in memory that stays where it is, for steps that are recorded once and repeated.

    A step has `size` tokens, of which the last may be padding, as in `StaticDecode`.
    """

    def load(
        self, tokens: Sequence[int], contexts: Sequence[int], lengths: Sequence[int], names: Sequence[int], size: int
    ) -> None:
        """Fill the inputs of the next step with one copy to the device: the requests of these names, each with so many
        tokens after those it remembers, end to end in `tokens`, and padding up to `size`.

        Raises `WrongState` where a position is not reserved.
        """
        ...

    def tokens(self, size: int) -> Tensor:
        """The tokens [size], int64."""
        ...

    def batch(self, size: int) -> StaticMixedBatch:
        """A batch over these inputs; a new one at every call, as what layers keep by batch holds for one run."""
        ...

    def view(self, size: int) -> ModelState:
        """The views of a step; `rows` of a `Paged` one raises `NotGraphSafe`, `in_place` gives `StaticMixedRows`."""
        ...


@runtime_checkable
class StaticMixedStore(Protocol):
    """A store whose steps with prompts can be recorded once and repeated."""

    def static_mixed(self, tokens: int, requests: int, longest: int) -> StaticMixed:
        """The inputs of steps of at most `tokens` tokens of at most `requests` requests, which have at most `longest`
        tokens each.

        Raises `NotGraphSafe` where a state of the store, or its way of keeping it, does not allow that.
        """
        ...


class CacheFamily(ABC):
    """A kind of store that a plugin offers by name.

    `loss` is the largest error of a number that is read back, as a share of the largest magnitude that was written to
    its field; 0 where rows are read as they were written. `portable` says whether each of its stores is a
    `PortableStore`, so that a request can go on in a store of another process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    loss: ClassVar[float] = 0.0
    portable: ClassVar[bool] = False

    @abstractmethod
    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """An empty store for a model with these states."""

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """Bytes that one request of `tokens` tokens over `source` source tokens weighs in a store of this kind."""
        return sum(state_bytes(states, tokens=tokens, source=source, dtype=dtype) for states in specs.values())

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """Bytes that a store of this size takes when it is full, without sources; each window has `size.tokens`.

        States of fixed size have a place more than there are requests, for the padding of static steps.
        """
        states = [spec for layer in specs.values() for spec in layer.values()]
        rows = sum(spec.row_bytes(size.dtype) for spec in states if isinstance(spec, Paged))
        fixed = sum(spec.row_bytes(size.dtype) for spec in states if isinstance(spec, Slot))
        return rows * size.tokens + fixed * (size.requests + 1)
