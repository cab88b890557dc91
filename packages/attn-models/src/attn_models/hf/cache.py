"""The states of a batch of sequences, as a cache of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import InvalidValue
from attn_core.stores import StateStore, StoreSize
from torch import Tensor
from transformers import Cache

FIRST = 64
"""The fewest tokens of each sequence for which memory is allocated."""


class StateCache(Cache):
    """The states of every layer after the tokens of a batch of sequences: keys and values, or whatever mechanisms keep.

    They are in a store of attn (`contiguous`), which grows by doubling. Padding takes no memory and no position.
    """

    def __init__(self, decoder: Any, batch: int, sources: Iterable[Any] = ()) -> None:
        super().__init__(layers=[])
        self.decoder = decoder
        self.batch = batch
        self.sources = list(sources)
        """The encoder states of each sequence, for a model with an encoder."""
        self.columns = 0
        """The number of tokens that were given for each sequence, padding included."""
        self.contexts = [0] * batch
        """The number of tokens of each sequence that are computed, without padding."""
        self.names = list(range(batch))
        self._next = batch
        self._capacity = 0
        self._store: StateStore | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 -- the signature of transformers
        """The number of tokens that were given for each sequence, padding included."""
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """The context of the model in tokens."""
        return int(self.decoder.max_seq_len)

    @property
    def is_compileable(self) -> bool:
        """Always False: the number of cached rows is known on the host."""
        return False

    def step(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Hidden states [batch, new, width] of new tokens [batch, new], zeros where `real`, bool, is False.

        Raises `InvalidValue` for another number of sequences, and beyond the context of the model.
        """
        if len(tokens) != self.batch:
            raise InvalidValue.of("input_ids", f"{len(tokens)} sequences", f"{self.batch}, as in the cache")
        whole = bool(real.all())
        lengths = [tokens.shape[1]] * self.batch if whole else real.sum(1).tolist()
        rows = [row for row, length in enumerate(lengths) if length]
        longest = max(context + length for context, length in zip(self.contexts, lengths, strict=True))
        store = self._with_room(longest)
        batch = RaggedBatch.of(
            [lengths[row] for row in rows],
            [self.contexts[row] for row in rows],
            lambda numbers: torch.tensor(numbers, dtype=torch.int64, device=tokens.device),
        )
        view = store.view(batch, [self.names[row] for row in rows])
        found = self.decoder.step(tokens.flatten() if whole else tokens[real], batch, view)
        if whole:
            hidden: Tensor = found.view(*tokens.shape, -1)
        else:
            hidden = found.new_zeros(*tokens.shape, found.shape[-1])
            hidden[real] = found
        self.contexts = [context + length for context, length in zip(self.contexts, lengths, strict=True)]
        self.columns += tokens.shape[1]
        return hidden

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue each sequence from that of another beam: sequence i from sequence `beam_idx[i]`."""
        chosen = beam_idx.tolist()
        if chosen == list(range(self.batch)):
            return
        store: Any = self._with_room(max(self.contexts))
        kept: dict[int, int] = {}
        names = []
        for row in chosen:
            if row not in kept:
                kept[row] = self.names[row]
                names.append(self.names[row])
                continue
            self._next += 1
            store.fork(self.names[row], self._next, self.contexts[row])
            names.append(self._next)
        for row, name in enumerate(self.names):
            if row not in kept:
                store.release(name)
        self.names, self.contexts = names, [self.contexts[row] for row in chosen]
        self.sources = [self.sources[row] for row in chosen] if self.sources else []

    def _with_room(self, tokens: int) -> StateStore:
        """The store, with room for this many tokens of every sequence."""
        if tokens > self.decoder.max_seq_len:
            allowed = f"at most the context of {self.decoder.max_seq_len} tokens"
            raise InvalidValue.of("input_ids", f"{tokens} tokens", allowed)
        if self._store is None or tokens > self._capacity:
            self._grow(min(self.decoder.max_seq_len, max(FIRST, 2 * tokens)))
        store = self._store
        if store is None:
            raise InvalidValue.of("past_key_values", "a cache without a store", "a new cache")
        for name in self.names:
            store.reserve(name, tokens)
        return store

    def _grow(self, capacity: int) -> None:
        old: Any = self._store
        parameter = next(self.decoder.parameters())
        # Beams that go on from one sequence are copied before the others are released.
        most = 2 * self.batch
        dtype, device = str(parameter.dtype).removeprefix("torch."), str(parameter.device)
        size = StoreSize(tokens=capacity * most, requests=most, dtype=dtype, device=device)
        store: Any = installed().caches.get("contiguous").create(self.decoder.state_specs(), size)
        for row, (name, tokens) in enumerate(zip(self.names, self.contexts, strict=True)):
            if old is None or not tokens:
                store.admit(name)
                if self.sources:
                    store.write_source(name, self.sources[row])
            else:
                store.restore(name, old.export(name, tokens))
        self._store, self._capacity = store, capacity
