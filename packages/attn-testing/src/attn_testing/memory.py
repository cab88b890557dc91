"""The test kit's own state store: nested dictionaries, written to be evidently correct; also the oracle for caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from attn_core import Field, Paged, RaggedBatch, Slot, Source, StateSpec, StateSpecs
from attn_core.batch import Fields, ModelState, Rows
from attn_core.stores import ModelSpecs, Usage
from torch import Tensor

from attn_testing.law import require

Address = tuple[str, str]
"""The names of a layer and of one of its states."""

Item = TypeVar("Item")

RUBBISH = 17.0
"""The value of padding rows: finite, as in real memory, and wrong wherever it is used."""


@dataclass
class Held:
    """The states of one request: place -> row for paged states, one row or the source rows for the others.

    A place is a position, except for the tokens of a tree; see `RaggedBatch`.
    """

    pages: dict[Address, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    slots: dict[Address, dict[str, Tensor]] = field(default_factory=dict)
    sources: dict[Address, dict[str, Tensor]] = field(default_factory=dict)


class DictionaryStore:
    """An unbounded `StateStore` in which every row is a separate tensor; `dtype` is the name of the model's dtype,
    and `device` where states are created (by default the CPU).

    A layer gets no rows outside the window of a state, the rows of windowed states in the order of a ring buffer after
    their padding, and `RUBBISH` in the padding.
    """

    def __init__(self, specs: ModelSpecs, dtype: str = "float64", device: str | None = None) -> None:
        self.specs = specs
        self.dtype = dtype
        self.device = device
        self._held: dict[int, Held] = {}

    def fits(self, tokens: int) -> bool:
        """Always True."""
        return True

    def admit(self, request: int) -> bool:
        """Open an empty request."""
        self._held[request] = Held()
        return True

    def reserve(self, request: int, tokens: int) -> bool:
        """True for every request that was admitted."""
        return request in self._held

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Store the source rows, layer -> state -> field [source, ...]."""
        for layer, states in source.items():
            for state, fields in states.items():
                spec = self.specs[layer][state]
                self._held[request].sources[layer, state] = {n: self.cast(spec, n, x) for n, x in fields.items()}

    def release(self, request: int) -> None:
        """Delete the states of the request."""
        del self._held[request]

    def order(self, requests: Sequence[int]) -> list[int]:
        """The requests in the given order."""
        return list(requests)

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """The views of one step."""
        held = [self._held[request] for request in requests]
        self._forget(batch, requests)
        return {
            layer: {state: VIEWS[type(spec)](self, (layer, state), batch, held) for state, spec in states.items()}
            for layer, states in self.specs.items()
        }

    def tree_unsupported_reason(self) -> str | None:
        """See `attn_core.TreeStore.tree_unsupported_reason`."""
        fixed = [".".join((layer, s)) for layer, states in self.specs.items() for s in states if _fixed(states[s])]
        return f"{fixed[0]} exists once a request, or in rows of several of its tokens" if fixed else None

    def accept_path(self, request: int, tokens: int, places: Sequence[int]) -> None:
        """See `attn_core.TreeStore.accept_path`."""
        for rows in self._held[request].pages.values():
            kept = {place: row for place, row in rows.items() if place < tokens}
            kept |= {tokens + n: rows[place] for n, place in enumerate(places)}
            rows.clear()
            rows.update(kept)

    def live_bytes(self, request: int, tokens: int) -> int:
        """The bytes of the tensors that a request holds after `tokens` tokens."""
        held, weight = self._held[request], 0
        for (layer, state), rows in held.pages.items():
            window = self.window(layer, state)
            first = 0 if window is None else tokens - window
            weight += sum(weigh(row) for position, row in rows.items() if first <= position < tokens)
        return weight + sum(weigh(row) for row in [*held.slots.values(), *held.sources.values()])

    def usage(self) -> Usage:
        """The number of requests held; tokens are not counted, as they are unbounded."""
        count = len(self._held)
        return Usage(tokens=0, tokens_total=0, requests=count, requests_total=count)

    def window(self, layer: str, state: str) -> int | None:
        """The window of a paged state; None without one."""
        spec = self.specs[layer][state]
        return spec.window if isinstance(spec, Paged) else None

    def cast(self, spec: StateSpec, name: str, rows: Tensor) -> Tensor:
        """Convert rows to the dtype of the field in the spec, or to that of the model."""
        stated = spec.fields[name].dtype if name in spec.fields else None
        kind: torch.dtype = getattr(torch, stated or self.dtype)
        return rows.to(kind)

    def zero(self, row: Field) -> Tensor:
        """The initial value of a field of a slot."""
        return torch.zeros(row.shape, dtype=getattr(torch, row.dtype or self.dtype), device=self.device)

    def _forget(self, batch: RaggedBatch, requests: Sequence[int]) -> None:
        # In a tree, the token with the smallest context attends furthest back.
        contexts: dict[int, int] = {}
        for request, context in zip(requests, batch.contexts, strict=True):
            contexts[request] = min(context, contexts.get(request, context))
        for request, context in contexts.items():
            for (layer, state), rows in self._held[request].pages.items():
                window = self.window(layer, state)
                if window is not None:
                    for position in [p for p in rows if p <= context - window]:
                        del rows[position]


@torch.no_grad()
def stepped_logits(model: Any, tokens: Tensor, counts: Iterable[int], source: Tensor | None = None) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence [tokens], computed in steps of `counts` tokens.

    `source` is the encoder input of an encoder-decoder model.
    """
    exact = next(model.parameters()).dtype == torch.float64
    store, done, found = DictionaryStore(model.state_specs(), "float64" if exact else "float32"), 0, []
    store.admit(0)
    if source is not None:
        store.write_source(0, model.encode(source))
    for count in counts:
        batch = RaggedBatch.of([count], [done], torch.tensor)
        found.append(model.logits(model.step(tokens[done : done + count], batch, store.view(batch, [0]))))
        done += count
    return torch.cat(found)


def rounding(states: Iterable[StateSpecs]) -> float:
    """The tolerance for float64 computations with these states: larger if states are stored in a narrower dtype."""
    kept = {row.dtype for specs in states for spec in specs.values() for row in spec.fields.values()}
    return 3e-2 if kept & {"float16", "bfloat16"} else 1e-4 if "float32" in kept else 1e-10


def _fixed(spec: StateSpec) -> bool:
    return isinstance(spec, Slot) or (isinstance(spec, Paged) and spec.every > 1)


def weigh(fields: Mapping[str, Tensor]) -> int:
    """The bytes of the elements of some tensors."""
    return sum(rows.numel() * rows.element_size() for rows in fields.values())


@dataclass
class View:
    """Base class of views: a state in a store, for the requests of a step."""

    store: DictionaryStore
    address: Address
    batch: RaggedBatch
    held: list[Held]

    @property
    def spec(self) -> StateSpec:
        """The spec of the state."""
        return self.store.specs[self.address[0]][self.address[1]]


class PagedRows(View):
    """The view of a paged state, with one row per token, or per several."""

    def append(self, fields: Fields) -> Fields:
        """Store this step's rows, [tokens, ...] each; returns them as stored."""
        cast = {name: self.store.cast(self.spec, name, rows) for name, rows in fields.items()}
        written = [(request, place) for request, places in enumerate(self._places()) for place in places]
        for name, given in cast.items():
            where = f"{'.'.join(self.address)}.{name}"
            require(len(given) == len(written), f"{where}: {len(given)} rows were appended, not {len(written)}")
        for row, (request, place) in enumerate(written):
            rows = self.held[request].pages.setdefault(self.address, {})
            rows[place] = {name: tensor[row].clone() for name, tensor in cast.items()}
        return cast

    def _places(self) -> Iterable[Sequence[int]]:
        """Where the rows of each request are written: at positions, those of the last tokens of rows of several."""
        every = self.spec.every if isinstance(self.spec, Paged) else 1
        if every == 1:
            return map(self.batch.places, range(self.batch.requests))
        return [[(row + 1) * every - 1 for row in rows] for rows in self.batch.new_rows(every)]

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows stored for these requests, including those of this step."""
        kept = [self._seen(request) for request in requests]
        window = self.store.window(*self.address)
        order = [sorted(rows) if window is None else sorted(rows, key=lambda p: (p % window, p)) for rows in kept]
        listed = [[rows[p] for p in places] for rows, places in zip(kept, order, strict=True)]
        found = padded(listed, order, ring=window is not None, device=self.store.device)
        if found.fields or not isinstance(self.spec, Paged) or self.spec.every == 1:
            return found
        zeros = {name: self.store.zero(row) for name, row in self.spec.fields.items()}
        return dataclasses.replace(found, fields={n: x.expand(len(kept), 0, *x.shape) for n, x in zeros.items()})

    def _seen(self, request: int) -> dict[int, dict[str, Tensor]]:
        """Position -> row; for a token of a tree, the rows before the tree, those of its ancestors, and its own."""
        rows, path = self.held[request].pages.get(self.address, {}), self.batch.path(request)
        if not path:
            return rows
        first = self.batch.contexts[request] + 1 - len(path)
        before = {place: row for place, row in rows.items() if place < first}
        return before | {first + n: rows[place] for n, place in enumerate(path) if place in rows}


class SourceRows(View):
    """The view of a source state, with one row per source token."""

    def rows(self, requests: Sequence[int]) -> Rows:
        """The source rows of these requests."""
        listed = []
        for request in requests:
            fields = self.held[request].sources[self.address]
            count = len(next(iter(fields.values())))
            listed.append([{name: rows[i] for name, rows in fields.items()} for i in range(count)])
        return padded(listed, [list(range(len(rows))) for rows in listed], ring=False, device=self.store.device)


class SlotRows(View):
    """The view of a slot, a state of fixed size per request."""

    def read(self) -> Fields:
        """The state of every request, [requests, ...] each; initially zeros."""
        zeros = {name: self.store.zero(row) for name, row in self.spec.fields.items()}
        rows = [held.slots.get(self.address, zeros) for held in self.held]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def write(self, fields: Fields) -> None:
        """Replace the state of every request."""
        cast = {name: self.store.cast(self.spec, name, rows) for name, rows in fields.items()}
        for request, held in enumerate(self.held):
            held.slots[self.address] = {name: rows[request].clone() for name, rows in cast.items()}


VIEWS: Mapping[type[StateSpec], Any] = {Paged: PagedRows, Slot: SlotRows, Source: SourceRows}


def padded(
    listed: list[list[dict[str, Tensor]]], order: list[list[int]], *, ring: bool, device: str | None = None
) -> Rows:
    """The rows of several requests, padded to the longest with `RUBBISH`: at the front for a ring, else at the end."""
    longest = max(map(len, order))
    example = next((rows[0] for rows in listed if rows), {})
    spare = [longest - len(places) for places in order]
    fields = {}
    for name, one in example.items():
        filler = [torch.full_like(one, RUBBISH)]
        stacks = [
            pad([row[name] for row in rows], filler * n, first=ring) for rows, n in zip(listed, spare, strict=True)
        ]
        fields[name] = torch.stack([torch.stack(stack) for stack in stacks])
    positions = torch.tensor(
        [pad(places, [0] * n, first=ring) for places, n in zip(order, spare, strict=True)], device=device
    )
    key_padding_mask = torch.tensor(
        [pad([True] * len(places), [False] * n, first=ring) for places, n in zip(order, spare, strict=True)],
        device=device,
    )
    return Rows(fields, positions.long(), key_padding_mask if any(spare) else None)


def pad(items: list[Item], padding: list[Item], *, first: bool) -> list[Item]:
    """The items with the padding before or after them."""
    return padding + items if first else items + padding
