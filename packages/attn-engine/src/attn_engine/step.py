"""One forward pass over the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from attn_core import RaggedBatch, Source
from attn_core.errors import InternalError
from attn_core.models import GreedyHead, LanguageModel, SourceModel
from attn_core.stores import StateStore
from torch import Tensor

from attn_engine.scheduler import Chunk
from attn_engine.witness import Witness


class Part(NamedTuple):
    """One request of a batch: whose states it reads, its tokens, and where it stands."""

    number: int
    length: int
    context: int
    path: tuple[int, ...] | None = None


class Forward:
    """Runs the model over ragged batches against the store."""

    def __init__(self, model: LanguageModel, store: StateStore) -> None:
        self.model = model
        self.store = store
        parameter = next(iter(model.parameters()), None)  # type: ignore[attr-defined]
        self._finds = model if isinstance(model, GreedyHead) else None
        self.device = torch.device("cpu") if parameter is None else parameter.device
        states = [spec for specs in model.state_specs().values() for spec in specs.values()]
        self.has_source = any(isinstance(spec, Source) for spec in states)
        self.source_context = cast("SourceModel", model).source_context if self.has_source else None

    def enter(self, number: int, source_ids: Sequence[int] | None) -> None:
        """Encode the source of a request that was just admitted, where the model has one."""
        if self.has_source and source_ids is not None:
            model = cast("SourceModel", self.model)
            self.store.write_source(number, model.encode(self._tensor(list(source_ids))))

    def run(self, chunks: Sequence[Chunk], witness: Witness | None = None) -> tuple[list[Chunk], Tensor]:
        """Compute the chunks; returns them in batch order and their hidden rows [tokens, width].

        Raises whatever the model raises, and `InternalError` where it gives fewer or more rows.
        """
        by_number = {chunk.sequence.number: chunk for chunk in chunks}
        numbers = self.store.order(list(by_number))
        ordered = [by_number[number] for number in numbers]
        batch, names = self._batch(ordered)
        tokens = [
            token
            for chunk in ordered
            for token in (*chunk.sequence.tokens[chunk.start : chunk.start + chunk.length], *chunk.guess.tokens)
        ]
        state = self.store.view(batch, names)
        hidden = self.model.step(self._tensor(tokens), batch, witness.watched(state) if witness else state)
        if hidden.dim() != 2 or len(hidden) != len(tokens):
            raise InternalError(f"the model gave hidden rows {tuple(hidden.shape)} for {len(tokens)} tokens")
        if witness:
            witness.look(hidden)
        return ordered, hidden

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [rows, vocabulary] of these rows of hidden [tokens, width]."""
        return self.model.logits(self._chosen(hidden, rows))

    def greedy_tokens(self, hidden: Tensor, rows: Sequence[int]) -> list[int] | None:
        """The likeliest token after each of these rows of hidden [tokens, width], -1 where there is none; None where
        only logits can tell."""
        found = None if self._finds is None else self._finds.greedy_tokens(self._chosen(hidden, rows))
        return None if found is None else cast("list[int]", found.tolist())

    def _chosen(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        # Of equal number is not enough: completions of one prompt share its last row.
        return hidden if list(rows) == list(range(len(hidden))) else hidden[self._tensor(list(rows))]

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[RaggedBatch, list[int]]:
        """The batch, and whose states each of its requests reads: each token of a tree is a request for itself."""
        if not any(chunk.guess.branches for chunk in chunks):
            lengths, contexts = [chunk.rows for chunk in chunks], [chunk.start for chunk in chunks]
            return RaggedBatch.of(lengths, contexts, self._tensor), [chunk.sequence.number for chunk in chunks]
        parts: list[Part] = []
        for chunk in chunks:
            number, end = chunk.sequence.number, chunk.start + chunk.length
            if not chunk.guess.branches:
                parts.append(Part(number, chunk.rows, chunk.start))
                continue
            parts.append(Part(number, chunk.length, chunk.start))
            for node in range(len(chunk.guess)):
                path = tuple(end + ancestor for ancestor in chunk.guess.path(node))
                parts.append(Part(number, 1, end + len(path) - 1, path))
        lengths, contexts = [part.length for part in parts], [part.context for part in parts]
        batch = RaggedBatch.of(lengths, contexts, self._tensor, [part.path for part in parts])
        return batch, [part.number for part in parts]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
