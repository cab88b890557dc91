"""Running a layer as an engine would: steps over requests whose memory the kit keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attn_core import Capability, LayerState, RaggedBatch, StateStore
from torch import Tensor

from attn_testing.case import Case
from attn_testing.memory import DictionaryStore

LAYER = "layer"


class Serving:
    """Requests of one layer and how far each has come."""

    def __init__(self, case: Case, store: StateStore | None = None) -> None:
        self.case = case
        self.store: StateStore = DictionaryStore({LAYER: case.specs}) if store is None else store
        self.done: dict[int, int] = {}

    def open(self, request: int, source: Tensor | None = None) -> None:
        """Admit a request, with its source [source, width] where the layer attends to one."""
        self.store.admit(request)
        self.done[request] = 0
        if source is not None:
            self.store.write_source(request, {LAYER: self.case.layer.encode(source)})

    def step(self, new: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Outputs [tokens, width] of the new rows [tokens, width] of each request, computed in one step."""
        names = list(new)
        batch = ragged([len(rows) for rows in new.values()], [self.done[name] for name in names])
        for name in names:
            self.store.reserve(name, self.done[name] + len(new[name]))
        state = self.store.view(batch, names)[LAYER]
        with torch.no_grad():
            out = self._compute(torch.cat(list(new.values())), batch, state)
        for name in names:
            self.done[name] += len(new[name])
        return {names[span.request]: out[span.start : span.stop] for span in batch.spans()}

    def _compute(self, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        layer: Any = self.case.layer
        if self.case.mechanism.can(Capability.INCREMENTAL):
            stepped: Tensor = layer.step(rows, batch, state)
            return stepped
        return replay(layer, rows, batch, state)


def replay(layer: Any, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """The step of a layer that has none: its inputs are remembered and the full sequence is run again."""
    inputs = state["inputs"]
    inputs.append({"x": rows})
    out = [layer(inputs.rows([r]).fields["x"])[0, -length:] for r, length in enumerate(batch.lengths)]
    return torch.cat(out)


def ragged(lengths: list[int], contexts: list[int]) -> RaggedBatch:
    """The batch of these lengths and contexts, with int64 tensors."""
    return RaggedBatch.of(lengths, contexts, lambda numbers: torch.tensor(numbers, dtype=torch.int64))
