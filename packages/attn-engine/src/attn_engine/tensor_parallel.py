"""Tensor parallelism: one engine over several processes (ranks), each with some heads of the model (arXiv 1909.08053).

The engine runs only on the first rank, which schedules, chooses tokens and returns outputs. Before each step it sends
the others the calls that it made on its store since the last step, and the tokens of the step. They repeat the calls on
their own stores, which hold the states of their own heads, and run the same step of the model, whose layers are summed
over the ranks. Nothing else determines what a rank does, so cancellations and deadlines, whose timing varies, cannot
make the ranks diverge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attn_core import CacheFamily, installed
from attn_core.batch import ModelState, RaggedBatch
from attn_core.errors import Incompatible, InternalError, Unavailable
from attn_core.models import LanguageModel
from attn_core.stores import BranchingStore, PrefixStore, StateStore, StoreSize, TreeStore, Usage
from torch import Tensor

from attn_engine.host_numbers import on_device

LOST = "a tensor-parallel rank of the model has ended"


class Leader:
    """The first rank's side: sends store calls and steps to the other ranks.

    `send` delivers a message to all of them, in order. `lost` is called once, with the error, when they can no longer
    follow: a step that failed on this rank leaves them in the middle of a collective sum.
    """

    def __init__(self, send: Callable[[bytes], None], lost: Callable[[Exception], None]) -> None:
        self._send = send
        self._lost = lost
        self._entries: list[list[Any]] = []
        self.ended: Exception | None = None

    def open_store(self, family: CacheFamily, size: StoreSize, store: StateStore) -> LeadingStore:
        """Wrap a store of this rank, and let every other rank open one of the same family and `size`.

        Raises `Incompatible` for a family whose stores cannot fork a request or hold a draft tree.
        """
        if not (isinstance(store, BranchingStore) and isinstance(store, TreeStore)):
            raise Incompatible(
                f"the cache {family.name!r} cannot be split over ranks: it cannot fork requests or hold draft trees"
            )
        name = installed().caches.name_of(family)
        self.note("open", name, size.tokens, size.requests, size.dtype)
        kind = LeadingPrefixStore if isinstance(store, PrefixStore) else LeadingStore
        return kind(store, self)

    def note(self, *entry: Any) -> None:
        """Queue an entry to be sent with the next step: a method of the store, its arguments and its result."""
        self._entries.append(list(entry))

    @contextmanager
    def step(self, tokens: Sequence[int]) -> Iterator[None]:
        """Context manager in which this rank computes a step of these tokens while the others do the same.

        Raises `Unavailable` if the other ranks have ended.
        """
        if self.ended is not None:
            raise Unavailable(LOST) from self.ended
        self.note("step", list(tokens))
        try:
            self._flush()
            yield
        except Exception as error:
            self.end(error)
            raise

    def stop(self) -> None:
        """Tell the other ranks to stop."""
        if self.ended is None:
            self.ended = Unavailable("the engine was stopped")
            self.note("stop")
            self._flush()

    def end(self, error: Exception) -> None:
        """Record that the other ranks can no longer follow, and call `lost`."""
        if self.ended is None:
            self.ended = error
            self._lost(error)

    def _flush(self) -> None:
        entries, self._entries = self._entries, []
        self._send(json.dumps(entries, separators=(",", ":")).encode())


class LeadingStore:
    """A store whose changes are sent to the other ranks. Implements `StateStore`, `BranchingStore` and `TreeStore`.

    It is not portable, as it holds the states of only some heads.
    """

    def __init__(self, store: Any, ranks: Leader) -> None:
        self._store = store
        self.ranks = ranks

    def fits(self, tokens: int) -> bool:
        """See `StateStore.fits`."""
        return bool(self._store.fits(tokens))

    def holds(self, requests: int, tokens: int) -> bool:
        """See `BranchingStore.holds`."""
        return bool(self._store.holds(requests, tokens))

    def admit(self, request: int) -> bool:
        """See `StateStore.admit`."""
        return bool(self._call("admit", request))

    def reserve(self, request: int, tokens: int) -> bool:
        """See `StateStore.reserve`."""
        return bool(self._call("reserve", request, tokens))

    def write_source(self, request: int, source: object) -> None:
        """Raise `Incompatible`, as models with an encoder cannot be split."""
        del source
        raise Incompatible("a model with an encoder cannot be split over ranks", request=request)

    def release(self, request: int) -> None:
        """See `StateStore.release`."""
        self._call("release", request)

    def order(self, requests: Sequence[int]) -> list[int]:
        """See `StateStore.order`."""
        found: list[int] = self._store.order(requests)
        return found

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """See `StateStore.view`."""
        views: ModelState = self._store.view(batch, requests)
        self.ranks.note("view", list(batch.lengths), list(batch.contexts), list(batch.paths), list(requests))
        return views

    def live_bytes(self, request: int, tokens: int) -> int:
        """See `StateStore.live_bytes`; counts only this rank's heads."""
        return int(self._store.live_bytes(request, tokens))

    def usage(self) -> Usage:
        """See `StateStore.usage`; the same on every rank."""
        usage: Usage = self._store.usage()
        return usage

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """See `BranchingStore.fork`."""
        return bool(self._call("fork", request, copy, tokens))

    def mark(self, request: int, tokens: int) -> None:
        """See `BranchingStore.mark`."""
        self._call("mark", request, tokens)

    def rewind(self, request: int, tokens: int) -> int:
        """See `BranchingStore.rewind`."""
        return int(self._call("rewind", request, tokens))

    def tree_unsupported_reason(self) -> str | None:
        """See `TreeStore.tree_unsupported_reason`."""
        reason: str | None = self._store.tree_unsupported_reason()
        return reason

    def accept_path(self, request: int, tokens: int, slots: Sequence[int]) -> None:
        """See `TreeStore.accept_path`."""
        self._call("accept_path", request, tokens, list(slots))

    def _call(self, method: str, *arguments: Any) -> Any:
        result = getattr(self._store, method)(*arguments)
        self.ranks.note(method, *arguments, result)
        return result


class LeadingPrefixStore(LeadingStore):
    """A `LeadingStore` that is also a `PrefixStore`."""

    def __init__(self, store: Any, ranks: Leader) -> None:
        super().__init__(store, ranks)
        self._remembered: dict[int, list[int]] = {}

    def release(self, request: int) -> None:
        """See `StateStore.release`."""
        self._remembered.pop(request, None)
        super().release(request)

    def adopt(self, request: int, tokens: Sequence[int], scope: str) -> int:
        """See `PrefixStore.adopt`."""
        return int(self._call("adopt", request, list(tokens), scope))

    def remember(self, request: int, tokens: Sequence[int], computed: int, scope: str) -> None:
        """See `PrefixStore.remember`; tokens of a request that the other ranks already have are not sent again."""
        self._store.remember(request, tokens, computed, scope)
        known, sent = list(tokens[:computed]), self._remembered.get(request, [])
        same = len(sent) if known[: len(sent)] == sent else 0
        self._remembered[request] = known
        self.ranks.note("remember", request, same, known[same:], scope)

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """See `PrefixStore.chunk`."""
        return int(self._store.chunk(computed, length, prompt))


class Follower:
    """A rank that executes the messages of the first one, with its heads of the model and a store of its own."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device  # type: ignore[attr-defined]
        self.store: Any = None
        self.stopped = False
        self._state: tuple[RaggedBatch, ModelState] | None = None
        self._remembered: dict[int, list[int]] = {}

    def follow(self, message: bytes) -> None:
        """Execute a message of `Leader`; raises `InternalError` if the store returns another result than there."""
        with torch.inference_mode():
            for method, *arguments in json.loads(message):
                self._do(method, arguments)

    def _do(self, method: str, arguments: list[Any]) -> None:
        match method, arguments:
            case "open", (family, tokens, requests, dtype):
                size = StoreSize(tokens=tokens, requests=requests, dtype=dtype, device=str(self.device))
                self.store = installed().caches.get(family).create(self.model.state_specs(), size)
            case "view", (lengths, contexts, paths, requests):
                trees = [None if path is None else tuple(path) for path in paths]
                batch = RaggedBatch.of(lengths, contexts, self._tensor, trees)
                self._state = batch, self.store.view(batch, requests)
            case "step", (tokens,) if self._state is not None:
                (batch, state), self._state = self._state, None
                self.model.step(self._tensor(tokens), batch, state)
            case "remember", (request, same, new, scope):
                known = self._remembered[request] = self._remembered.get(request, [])[:same] + new
                self.store.remember(request, known, len(known), scope)
            case "stop", ():
                self.stopped = True
            case _, (*given, result):
                if method == "release":
                    self._remembered.pop(given[0], None)
                found = getattr(self.store, method)(*given)
                if found != result:
                    raise InternalError(f"{method}{tuple(given)} returned {found} here and {result} on the first rank")

    def _tensor(self, values: list[int]) -> Tensor:
        return on_device(values, self.device)
