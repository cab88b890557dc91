"""What the two stores have in common in how they keep a row per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attn_core import Field, Paged, RaggedBatch
from attn_core.batch import PagedView
from attn_core.stores import ModelSpecs
from torch import Tensor

from attn_cache.bank import Key, states_of


class TokenStep(Protocol):
    """The token rows of one step; what its views share is computed once."""

    def view(self, layer: str, state: str) -> PagedView:
        """What one layer sees of one of its states."""
        ...


class TokenRows(Protocol):
    """Rows per token of all layers. Requests are numbered 0, 1, 2, ... without holes: their *places*."""

    @property
    def taken(self) -> int:
        """Tokens that are reserved."""
        ...

    @property
    def total(self) -> int:
        """Tokens that can be reserved."""
        ...

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens fits when nothing else is held."""
        ...

    def open(self) -> None:
        """Add an empty request at the next place."""
        ...

    def reserve(self, place: int, tokens: int) -> bool:
        """Make room for positions up to `tokens`; False, changing nothing, if there is none."""
        ...

    def close(self, place: int) -> None:
        """Free the request at `place`; the request at the last place takes it over."""
        ...

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether so many requests of this many tokens fit when nothing else is held."""
        ...

    def fork(self, place: int, tokens: int) -> bool:
        """Add a request at the next place with the first `tokens` rows of another; False without room."""
        ...

    def rewind(self, place: int, tokens: int) -> None:
        """Forget the rows from position `tokens` on."""
        ...

    def only_chains(self) -> str | None:
        """Why tokens of a tree cannot be held, for people; None if they can."""
        ...

    def move(self, place: int, sources: Sequence[int], start: int) -> None:
        """Let the rows at these positions lie side by side from position `start` on."""
        ...

    def step(self, places: Sequence[int], batch: RaggedBatch) -> TokenStep:
        """One step of the requests at these places."""
        ...

    def read(self, place: int, tokens: int) -> dict[Key, Tensor]:
        """The rows [rows, ...] that the token after the first `tokens` can see; raises `WrongState` without them."""
        ...

    def begin(self, place: int, tokens: int) -> None:
        """Let the empty request at `place` continue after `tokens` tokens, whose rows are yet to be reserved."""
        ...

    def write(self, place: int, tokens: int, rows: Mapping[Key, Tensor]) -> None:
        """Put what `read` gave elsewhere into the reserved rows."""
        ...

    def live_bytes(self, place: int, tokens: int) -> int:
        """Bytes of the rows that the next token of a request of `tokens` tokens could read."""
        ...


def first_visible(context: int, window: int | None) -> int:
    """The oldest position that a query at position `context` sees, itself included in the window."""
    return 0 if window is None else max(0, context - window + 1)


def windows_of(specs: ModelSpecs) -> dict[tuple[str, str], int | None]:
    """The window of every state with a row per token, by layer and state."""
    return {(layer, state): spec.window for layer, state, spec in states_of(specs, Paged)}


def fields_of(specs: ModelSpecs, window: int | None) -> dict[Key, Field]:
    """The fields of all states of this window with a row per token."""
    return {
        (layer, state, name): field
        for layer, state, spec in states_of(specs, Paged)
        if spec.window == window
        for name, field in spec.fields.items()
    }
