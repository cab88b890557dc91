"""One forward pass over the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from attn_core import LanguageModel, RaggedBatch, Source, SourceModel, StateStore
from attn_core.errors import InternalError
from torch import Tensor

from attn_engine.scheduler import Chunk
from attn_engine.witness import Witness


class Forward:
    """Runs the model over ragged batches against the store."""

    def __init__(self, model: LanguageModel, store: StateStore) -> None:
        self.model = model
        self.store = store
        parameter = next(iter(model.parameters()), None)  # type: ignore[attr-defined]
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
        batch = self._batch(ordered)
        tokens = [
            token
            for chunk in ordered
            for token in (*chunk.sequence.tokens[chunk.start : chunk.start + chunk.length], *chunk.guess)
        ]
        state = self.store.view(batch, numbers)
        hidden = self.model.step(self._tensor(tokens), batch, witness.watched(state) if witness else state)
        if hidden.dim() != 2 or len(hidden) != len(tokens):
            raise InternalError(f"the model gave hidden rows {tuple(hidden.shape)} for {len(tokens)} tokens")
        if witness:
            witness.look(hidden)
        return ordered, hidden

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [rows, vocabulary] of these rows of hidden [tokens, width]."""
        # Of equal number is not enough: completions of one prompt share its last row.
        chosen = hidden if list(rows) == list(range(len(hidden))) else hidden[self._tensor(list(rows))]
        return self.model.logits(chosen)

    def _batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        lengths = [chunk.rows for chunk in chunks]
        contexts = [chunk.start for chunk in chunks]
        return RaggedBatch.of(lengths, contexts, self._tensor)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
