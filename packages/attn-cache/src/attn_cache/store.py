"""The state store of a model: KV cache, fixed-size states and encoder states of all running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core import Fields, Paged, RaggedBatch, Slot, Source
from attn_core.batch import ModelState
from attn_core.errors import AlreadyExists, Incompatible, InvalidValue, NotGraphSafe, OutOfCapacity, WrongState
from attn_core.graph_safety import NO_BLOCKS
from attn_core.stores import ModelSpecs, StaticStep, StoreSize, Usage

from attn_cache.encoder_states import EncoderStates
from attn_cache.kv_cache import KVCache
from attn_cache.memory import states_of
from attn_cache.paged import PagedKVCache
from attn_cache.portable import StateLayout, pack, unpack
from attn_cache.slots import SlotStates, Snapshot
from attn_cache.static_step import StepInputs, StepLimits, check_states


class Store:
    """Implements `attn_core.stores.StateStore`, `BranchingStore`, `TreeStore` and `PortableStore` over any `KVCache`.

    Running requests have the indices 0, 1, 2, ... without gaps: when one is released, the last takes over its index.
    A batch in the order of `order` is therefore contiguous in memory.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, kv_cache: KVCache) -> None:
        self._max_requests = size.requests
        self._kv_cache = kv_cache
        self._slots = SlotStates(specs, size)
        self._encoder = EncoderStates(specs, size)
        self._layout = StateLayout(specs, size.dtype)
        self._specs = specs
        self._paged_states = [(layer, state) for layer, state, _ in states_of(specs, Paged)]
        self._indices: dict[int, int] = {}
        self._requests: list[int] = []
        self._marks: dict[int, tuple[int, Snapshot]] = {}

    @property
    def full(self) -> bool:
        """Whether as many requests as possible are admitted."""
        return len(self._requests) == self._max_requests

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens fits into the empty store."""
        return self._kv_cache.fits(tokens)

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether this many requests of this many tokens each fit into the empty store."""
        return requests <= self._max_requests and self._kv_cache.holds(requests, tokens)

    def admit(self, request: int) -> bool:
        """Add an empty request; False if the store is full. Raises `AlreadyExists` for a name in use."""
        if request in self._indices:
            raise AlreadyExists(f"request {request} is already in the store", request=request)
        if self.full:
            return False
        self._indices[request] = len(self._requests)
        self._requests.append(request)
        self._kv_cache.add_request()
        self._encoder.add_request()
        return True

    def reserve(self, request: int, tokens: int) -> bool:
        """Reserve capacity for positions below `tokens`; False, changing nothing, if there is not enough."""
        return self._kv_cache.reserve(self._index(request), tokens)

    def write_source(self, request: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Write the encoder states, layer -> state -> field [source_len, ...]."""
        self._encoder.write(self._index(request), source)

    def release(self, request: int) -> None:
        """Free everything the request holds."""
        index = self._index(request)
        self._marks.pop(request, None)
        last = len(self._requests) - 1
        self._kv_cache.remove_request(index)
        self._slots.remove_request(index, last)
        self._encoder.remove_request(index)
        del self._indices[request]
        name = self._requests.pop()
        if index != last:
            self._requests[index] = name
            self._indices[name] = index

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """Add `copy` with the state of `request`: full blocks and encoder states are shared, the rest is copied."""
        if copy in self._indices:
            raise AlreadyExists(f"request {copy} is already in the store", request=copy)
        index = self._index(request)
        if self.full or not self._kv_cache.fork(index, tokens):
            return False
        self._indices[copy] = len(self._requests)
        self._requests.append(copy)
        self._slots.fork(index, self._indices[copy])
        self._encoder.fork(index)
        return True

    def mark(self, request: int, tokens: int) -> None:
        """Take a snapshot of the fixed-size states, to which `rewind` can return; per-token rows need none."""
        if self._slots.names:
            self._marks[request] = (tokens, self._slots.snapshot(self._index(request)))

    def rewind(self, request: int, tokens: int) -> int:
        """Drop what was computed from position `tokens` on; with fixed-size states, from the last mark on.

        Returns how many tokens are left computed. Raises `WrongState` without a mark at or before `tokens`.
        """
        index = self._index(request)
        if self._slots.names:
            if request not in self._marks or self._marks[request][0] > tokens:
                raise WrongState(f"request {request} was not marked at or before {tokens} tokens")
            tokens, snapshot = self._marks[request]
            self._slots.restore(index, snapshot)
        self._kv_cache.rewind(index, tokens)
        return tokens

    def tree_unsupported_reason(self) -> str | None:
        """Why draft tokens cannot form a tree in this store; None if they can."""
        if self._slots.names:
            name = ".".join(self._slots.names[0])
            return f"{name} has a fixed size and exists once per request, so it cannot represent several branches"
        return self._kv_cache.tree_unsupported_reason()

    def accept_path(self, request: int, tokens: int, slots: Sequence[int]) -> None:
        """Keep the rows at these slots of a draft tree, a path in ascending order, as those after `tokens` tokens."""
        self._require_trees()
        if list(slots) != sorted(set(slots)) or (slots and slots[0] < tokens):
            raise InvalidValue.of("slots", list(slots), f"ascending slots from {tokens} on")
        index = self._index(request)
        if list(slots) != list(range(tokens, tokens + len(slots))):
            self._kv_cache.move(index, slots, tokens)
        self._kv_cache.rewind(index, tokens + len(slots))

    def export(self, request: int, tokens: int) -> bytes:
        """See `attn_core.PortableStore.export`; the request stays in the store."""
        if type(tokens) is not int or tokens < 0:
            raise InvalidValue.of("tokens", tokens, "a whole number from 0")
        index = self._index(request)
        rows = (
            self._kv_cache.export_rows(index, tokens)
            | self._slots.export_rows(index)
            | self._encoder.export_rows(index)
        )
        return pack(self._layout, tokens, rows)

    def restore(self, request: int, exported: bytes) -> int:
        """See `attn_core.PortableStore.restore`."""
        tokens, rows = unpack(self._layout, exported)
        if not self.fits(tokens):
            raise Incompatible(f"a request of {tokens} tokens never fits into this store", tokens=tokens)
        if not self.admit(request):
            raise OutOfCapacity(f"the store is full with {self._max_requests} requests", requests=self._max_requests)
        index = self._index(request)
        self._kv_cache.start_at(index, tokens)
        if not self.reserve(request, tokens):
            self.release(request)
            raise OutOfCapacity(f"there is no room for the {tokens} tokens of request {request} now", tokens=tokens)
        self._kv_cache.import_rows(index, tokens, self._layout.only(rows, Paged))
        self._slots.import_rows(index, self._layout.only(rows, Slot))
        self._encoder.import_rows(index, self._layout.only(rows, Source))
        return tokens

    def order(self, requests: Sequence[int]) -> list[int]:
        """The requests in memory order."""
        return sorted(requests, key=self._index)

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """The views of one step; valid until the next call of any method."""
        indices = [self._index(request) for request in requests]
        if batch.paths:
            self._require_trees()
        elif len(set(indices)) != len(indices):
            raise InvalidValue.of("requests", list(requests), f"{batch.requests} different requests")
        if len(indices) != batch.requests:
            raise InvalidValue.of("requests", list(requests), f"{batch.requests} different requests")
        step = self._kv_cache.step(indices, batch)
        views: dict[str, dict[str, object]] = {layer: {} for layer in self._specs}
        for layer, state in self._paged_states:
            views[layer][state] = step.view(layer, state)
        for (layer, state), view in (self._slots.views(indices) | self._encoder.views(indices)).items():
            views[layer][state] = view
        return views

    def static_step(self, tokens: int, requests: int, longest: int) -> StaticStep:
        """See `attn_core.stores.StaticStore`; the states must all be rows in blocks or of fixed size."""
        check_states(self._specs, max_query_len=1)
        if type(self._kv_cache) is not PagedKVCache:
            raise NotGraphSafe(NO_BLOCKS)
        memory, limits = (self._kv_cache, self._slots), StepLimits(tokens, requests, longest)
        return StepInputs(self._specs, memory, self._index, limits)

    def live_bytes(self, request: int, tokens: int) -> int:
        """Bytes of the tensors of a request of `tokens` tokens, without unused capacity."""
        index = self._index(request)
        live = self._kv_cache.live_bytes(index, tokens)
        return live + self._slots.live_bytes(index) + self._encoder.live_bytes(index)

    def usage(self) -> Usage:
        """Capacity in use now."""
        return Usage(
            tokens=self._kv_cache.used_tokens,
            tokens_total=self._kv_cache.total_tokens,
            requests=len(self._requests),
            requests_total=self._max_requests,
        )

    def _require_trees(self) -> None:
        reason = self.tree_unsupported_reason()
        if reason is not None:
            raise WrongState(f"this store supports no draft trees: {reason}")

    def _index(self, request: int) -> int:
        try:
            return self._indices[request]
        except KeyError:
            raise InvalidValue.of("request", request, "a request that was admitted and not released") from None
