"""The store of a model: token rows, fixed states and source states of all running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core import Fields, Paged, RaggedBatch, Slot, Source
from attn_core.batch import ModelState
from attn_core.errors import AlreadyExists, Incompatible, InvalidValue, OutOfCapacity, WrongState
from attn_core.stores import ModelSpecs, StoreSize, Usage

from attn_cache.bank import states_of
from attn_cache.fixed import FixedStates, Snapshot
from attn_cache.portable.archive import pack, unpack
from attn_cache.portable.layout import StateLayout
from attn_cache.rows import TokenRows
from attn_cache.source import SourceStates


class Store:
    """Implements `attn_core.stores.StateStore`; `tokens` says how rows per token are kept.

    Running requests have the places 0, 1, 2, ... without holes: when one leaves, the last takes its place, so a batch
    in the order of `order` lies side by side.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, tokens: TokenRows) -> None:
        self._requests = size.requests
        self._tokens = tokens
        self._fixed = FixedStates(specs, size)
        self._source = SourceStates(specs, size)
        self._layout = StateLayout(specs, size.dtype)
        self._layers = tuple(specs)
        self._token_states = [(layer, state) for layer, state, _ in states_of(specs, Paged)]
        self._places: dict[int, int] = {}
        self._names: list[int] = []
        self._fixed_names = [(layer, state) for layer, state, _ in states_of(specs, Slot)]
        self._has_fixed = bool(self._fixed_names)
        self._marks: dict[int, tuple[int, Snapshot]] = {}

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens could be held by an otherwise empty store."""
        return self._tokens.fits(tokens)

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether so many requests of this many tokens each could be held by an otherwise empty store."""
        return requests <= self._requests and self._tokens.holds(requests, tokens)

    def admit(self, request: int) -> bool:
        """Open an empty request; False if there is no place. Raises `AlreadyExists` for a name in use."""
        if request in self._places:
            raise AlreadyExists(f"request {request} is already in the store", request=request)
        if len(self._names) == self._requests:
            return False
        self._places[request] = len(self._names)
        self._names.append(request)
        self._tokens.open()
        self._source.open()
        return True

    def reserve(self, request: int, tokens: int) -> bool:
        """Make room for positions up to `tokens`, exclusive; False, changing nothing, if there is none."""
        return self._tokens.reserve(self._place(request), tokens)

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Fill the source states, layer -> state -> field [source, ...]."""
        self._source.write(self._place(request), source)

    def release(self, request: int) -> None:
        """Free everything the request holds."""
        place = self._place(request)
        self._marks.pop(request, None)
        last = len(self._names) - 1
        self._tokens.close(place)
        self._fixed.close(place, last)
        self._source.close(place)
        del self._places[request]
        name = self._names.pop()
        if place != last:
            self._names[place] = name
            self._places[name] = place

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """Open `copy` with the states of `request`: full pages and the source are shared, the rest is copied."""
        if copy in self._places:
            raise AlreadyExists(f"request {copy} is already in the store", request=copy)
        place = self._place(request)
        if len(self._names) == self._requests or not self._tokens.fork(place, tokens):
            return False
        self._places[copy] = len(self._names)
        self._names.append(copy)
        self._fixed.fork(place, self._places[copy])
        self._source.fork(place)
        return True

    def mark(self, request: int, tokens: int) -> None:
        """Take a snapshot of the states of fixed size; rows per token need none."""
        if self._has_fixed:
            self._marks[request] = (tokens, self._fixed.snapshot(self._place(request)))

    def rewind(self, request: int, tokens: int) -> int:
        """Forget what was computed from position `tokens` on, or from the mark on where states have a fixed size."""
        place = self._place(request)
        if self._has_fixed:
            if request not in self._marks or self._marks[request][0] > tokens:
                raise WrongState(f"request {request} was not marked at {tokens} tokens or before")
            tokens, snapshot = self._marks[request]
            self._fixed.restore(place, snapshot)
        self._tokens.rewind(place, tokens)
        return tokens

    def only_chains(self) -> str | None:
        """See `attn_core.TreeStore.only_chains`."""
        fixed = next(iter(self._fixed_names), None)
        if fixed is not None:
            return f"{'.'.join(fixed)} has a fixed size and exists once a request, so it cannot follow several tokens"
        return self._tokens.only_chains()

    def keep_path(self, request: int, tokens: int, places: Sequence[int]) -> None:
        """See `attn_core.TreeStore.keep_path`."""
        self._require_trees()
        if list(places) != sorted(set(places)) or (places and places[0] < tokens):
            raise InvalidValue.of("places", list(places), f"ascending places from {tokens} on")
        place = self._place(request)
        if list(places) != list(range(tokens, tokens + len(places))):
            self._tokens.move(place, places, tokens)
        self._tokens.rewind(place, tokens + len(places))

    def export(self, request: int, tokens: int) -> bytes:
        """See `attn_core.PortableStore.export`; the request stays."""
        if type(tokens) is not int or tokens < 0:
            raise InvalidValue.of("tokens", tokens, "a whole number from 0")
        place = self._place(request)
        rows = self._tokens.read(place, tokens) | self._fixed.read(place) | self._source.read(place)
        return pack(self._layout, tokens, rows)

    def restore(self, request: int, exported: bytes) -> int:
        """See `attn_core.PortableStore.restore`."""
        tokens, rows = unpack(self._layout, exported)
        if not self.fits(tokens):
            raise Incompatible(f"a request of {tokens} tokens never fits into this store", tokens=tokens)
        if not self.admit(request):
            raise OutOfCapacity(f"all {self._requests} places are taken", requests=self._requests)
        place = self._place(request)
        self._tokens.begin(place, tokens)
        if not self.reserve(request, tokens):
            self.release(request)
            raise OutOfCapacity(f"there is no room for the {tokens} tokens of request {request} now", tokens=tokens)
        self._tokens.write(place, tokens, self._layout.only(rows, Paged))
        self._fixed.write(place, self._layout.only(rows, Slot))
        self._source.restore(place, self._layout.only(rows, Source))
        return tokens

    def order(self, requests: Sequence[int]) -> list[int]:
        """The requests in the order of their places."""
        return sorted(requests, key=self._place)

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """The views of one step; valid until the next call of any method."""
        places = [self._place(request) for request in requests]
        if batch.paths:
            self._require_trees()
        elif len(set(places)) != len(places):
            raise InvalidValue.of("requests", list(requests), f"{batch.requests} different requests")
        if len(places) != batch.requests:
            raise InvalidValue.of("requests", list(requests), f"{batch.requests} different requests")
        step = self._tokens.step(places, batch)
        views: dict[str, dict[str, object]] = {layer: {} for layer in self._layers}
        for layer, state in self._token_states:
            views[layer][state] = step.view(layer, state)
        for (layer, state), view in (self._fixed.views(places) | self._source.views(places)).items():
            views[layer][state] = view
        return views

    def live_bytes(self, request: int, tokens: int) -> int:
        """Bytes of the tensors that a request of `tokens` tokens has in the store, without slack."""
        place = self._place(request)
        live = self._tokens.live_bytes(place, tokens)
        return live + self._fixed.live_bytes(place) + self._source.live_bytes(place)

    def usage(self) -> Usage:
        """What is taken now."""
        return Usage(
            tokens=self._tokens.taken,
            tokens_total=self._tokens.total,
            requests=len(self._names),
            requests_total=self._requests,
        )

    def _require_trees(self) -> None:
        reason = self.only_chains()
        if reason is not None:
            raise WrongState(f"this store holds no token trees: {reason}")

    def _place(self, request: int) -> int:
        try:
            return self._places[request]
        except KeyError:
            raise InvalidValue.of("request", request, "a request that was admitted and not released") from None
