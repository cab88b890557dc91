"""The kit's own store: dictionaries of lists, written to be evidently right. It is the oracle for caches too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from attn_core import Field, Paged, RaggedBatch, Slot, Source, StateSpec, StateSpecs
from attn_core.batch import Fields, ModelState, Rows
from attn_core.stores import ModelSpecs, Usage
from torch import Tensor

Address = tuple[str, str]
"""A layer and one of its states."""

Item = TypeVar("Item")

RUBBISH = 17.0
"""What padding rows hold: finite, as real memory is, and wrong wherever it is used."""


@dataclass
class Held:
    """What one request has in the store: place -> rows for paged states, one row or the source for the others.

    A place is a position but in a tree, see `RaggedBatch`.
    """

    pages: dict[Address, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    slots: dict[Address, dict[str, Tensor]] = field(default_factory=dict)
    sources: dict[Address, dict[str, Tensor]] = field(default_factory=dict)


class DictionaryStore:
    """A `StateStore` without bounds in which every row is a tensor of its own; `dtype` is the model's, by name.

    It gives a layer no row that the state's window does not promise, rows of windowed states in a ring's order behind
    their padding, and rubbish in the padding.
    """

    def __init__(self, specs: ModelSpecs, dtype: str = "float64") -> None:
        self.specs = specs
        self.dtype = dtype
        self._held: dict[int, Held] = {}

    def fits(self, tokens: int) -> bool:
        """Always."""
        return True

    def admit(self, request: int) -> bool:
        """Open an empty request."""
        self._held[request] = Held()
        return True

    def reserve(self, request: int, tokens: int) -> bool:
        """Always, for a request that was admitted."""
        return request in self._held

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Keep the source rows, layer -> state -> field [source, ...]."""
        for layer, states in source.items():
            for state, fields in states.items():
                spec = self.specs[layer][state]
                self._held[request].sources[layer, state] = {n: self.cast(spec, n, x) for n, x in fields.items()}

    def release(self, request: int) -> None:
        """Forget the request."""
        del self._held[request]

    def order(self, requests: Sequence[int]) -> list[int]:
        """As they come."""
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
        return f"{fixed[0]} has a fixed size and exists once a request" if fixed else None

    def accept_path(self, request: int, tokens: int, places: Sequence[int]) -> None:
        """See `attn_core.TreeStore.accept_path`."""
        for rows in self._held[request].pages.values():
            kept = {place: row for place, row in rows.items() if place < tokens}
            kept |= {tokens + n: rows[place] for n, place in enumerate(places)}
            rows.clear()
            rows.update(kept)

    def live_bytes(self, request: int, tokens: int) -> int:
        """Bytes of the tensors held after `tokens` tokens."""
        held, weight = self._held[request], 0
        for (layer, state), rows in held.pages.items():
            window = self.window(layer, state)
            first = 0 if window is None else tokens - window
            weight += sum(weigh(row) for position, row in rows.items() if first <= position < tokens)
        return weight + sum(weigh(row) for row in [*held.slots.values(), *held.sources.values()])

    def usage(self) -> Usage:
        """Requests held; tokens are not bounded here."""
        count = len(self._held)
        return Usage(tokens=0, tokens_total=0, requests=count, requests_total=count)

    def window(self, layer: str, state: str) -> int | None:
        """The window of a paged state."""
        spec = self.specs[layer][state]
        return spec.window if isinstance(spec, Paged) else None

    def cast(self, spec: StateSpec, name: str, rows: Tensor) -> Tensor:
        """Rows in the element type that the spec gives them."""
        stated = spec.fields[name].dtype if name in spec.fields else None
        kind: torch.dtype = getattr(torch, stated or self.dtype)
        return rows.to(kind)

    def zero(self, row: Field) -> Tensor:
        """The row a slot starts with."""
        return torch.zeros(row.shape, dtype=getattr(torch, row.dtype or self.dtype))

    def _forget(self, batch: RaggedBatch, requests: Sequence[int]) -> None:
        # Of a tree the token that stands first sees furthest back.
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
    """Logits [tokens, vocabulary] of one sequence [tokens], computed in steps of so many tokens; `source` is what an
    encoder-decoder model reads."""
    store, done, found = DictionaryStore(model.state_specs(), "float32"), 0, []
    store.admit(0)
    if source is not None:
        store.write_source(0, model.encode(source))
    for count in counts:
        batch = RaggedBatch.of([count], [done], torch.tensor)
        found.append(model.logits(model.step(tokens[done : done + count], batch, store.view(batch, [0]))))
        done += count
    return torch.cat(found)


def rounding(states: Iterable[StateSpecs]) -> float:
    """What float64 computations may differ by that remember these states: more where fewer bits are kept."""
    kept = {row.dtype for specs in states for spec in specs.values() for row in spec.fields.values()}
    return 3e-2 if kept & {"float16", "bfloat16"} else 1e-4 if "float32" in kept else 1e-10


def _fixed(spec: StateSpec) -> bool:
    return isinstance(spec, Slot)


def weigh(fields: Mapping[str, Tensor]) -> int:
    """Bytes of the elements of some tensors."""
    return sum(rows.numel() * rows.element_size() for rows in fields.values())


@dataclass
class View:
    """Where a view looks: a store, a state and the requests of a step."""

    store: DictionaryStore
    address: Address
    batch: RaggedBatch
    held: list[Held]

    @property
    def spec(self) -> StateSpec:
        """The spec of the state."""
        return self.store.specs[self.address[0]][self.address[1]]


class PagedRows(View):
    """Rows per token."""

    def append(self, fields: Fields) -> Fields:
        """Keep this step's rows, [tokens, ...] each."""
        cast = {name: self.store.cast(self.spec, name, rows) for name, rows in fields.items()}
        for span in self.batch.spans():
            rows = self.held[span.request].pages.setdefault(self.address, {})
            for row, place in zip(range(span.start, span.stop), self.batch.places(span.request), strict=True):
                rows[place] = {name: tensor[row].clone() for name, tensor in cast.items()}
        return cast

    def rows(self, requests: Sequence[int]) -> Rows:
        """Everything kept for these requests, this step's rows included."""
        kept = [self._seen(request) for request in requests]
        window = self.store.window(*self.address)
        order = [sorted(rows) if window is None else sorted(rows, key=lambda p: (p % window, p)) for rows in kept]
        listed = [[rows[p] for p in places] for rows, places in zip(kept, order, strict=True)]
        return padded(listed, order, ring=window is not None)

    def _seen(self, request: int) -> dict[int, dict[str, Tensor]]:
        """Position -> rows: of a tree, those of a token's ancestors and its own, behind what was there before."""
        rows, path = self.held[request].pages.get(self.address, {}), self.batch.path(request)
        if not path:
            return rows
        first = self.batch.contexts[request] + 1 - len(path)
        before = {place: row for place, row in rows.items() if place < first}
        return before | {first + n: rows[place] for n, place in enumerate(path) if place in rows}


class SourceRows(View):
    """Rows per source token."""

    def rows(self, requests: Sequence[int]) -> Rows:
        """The source rows of these requests."""
        listed = []
        for request in requests:
            fields = self.held[request].sources[self.address]
            count = len(next(iter(fields.values())))
            listed.append([{name: rows[i] for name, rows in fields.items()} for i in range(count)])
        return padded(listed, [list(range(len(rows))) for rows in listed], ring=False)


class SlotRows(View):
    """Fixed rows per request."""

    def read(self) -> Fields:
        """The state of every request, zeros at first, [requests, ...] each."""
        zeros = {name: self.store.zero(row) for name, row in self.spec.fields.items()}
        rows = [held.slots.get(self.address, zeros) for held in self.held]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def write(self, fields: Fields) -> None:
        """Replace the state of every request."""
        cast = {name: self.store.cast(self.spec, name, rows) for name, rows in fields.items()}
        for request, held in enumerate(self.held):
            held.slots[self.address] = {name: rows[request].clone() for name, rows in cast.items()}


VIEWS: Mapping[type[StateSpec], Any] = {Paged: PagedRows, Slot: SlotRows, Source: SourceRows}


def padded(listed: list[list[dict[str, Tensor]]], order: list[list[int]], *, ring: bool) -> Rows:
    """Rows of several requests, padded to the longest with rubbish: first in a ring, else last."""
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
    positions = torch.tensor([pad(places, [0] * n, first=ring) for places, n in zip(order, spare, strict=True)])
    key_padding_mask = torch.tensor(
        [pad([True] * len(places), [False] * n, first=ring) for places, n in zip(order, spare, strict=True)]
    )
    return Rows(fields, positions.long(), key_padding_mask if any(spare) else None)


def pad(items: list[Item], padding: list[Item], *, first: bool) -> list[Item]:
    """The items with the padding before or behind them."""
    return padding + items if first else items + padding
