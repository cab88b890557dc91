"""Runs a layer as an engine does: in steps over requests, whose states are in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from attn_core import Capability, LayerState, RaggedBatch
from attn_core.masks import Tree
from attn_core.state_faults import require_states
from attn_core.stores import StateStore, TreeStore
from torch import Tensor

from attn_testing.memory import DictionaryStore
from attn_testing.subject import Case

LAYER = "layer"


class Serving:
    """Runs a layer in steps over several requests, by default with a `DictionaryStore`.

    `done` is the number of computed tokens of each request.
    """

    def __init__(self, case: Case, store: StateStore | None = None, layer: Any = None) -> None:
        self.case = case
        self.layer = case.layer if layer is None else layer
        self.store: StateStore = DictionaryStore({LAYER: case.specs}) if store is None else store
        self.done: dict[int, int] = {}

    def open(self, request: int, source: Tensor | None = None) -> None:
        """Admit a request, with its source [source, width] if the layer attends to one."""
        self.store.admit(request)
        self.done[request] = 0
        if source is not None:
            self.store.write_source(request, {LAYER: self.layer.encode(source)})

    def step(self, new: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Outputs [tokens, width] for the new inputs [tokens, width] of each request, computed in one step."""
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

    def tree(self, request: int, rows: Tensor, parents: Sequence[int]) -> Tensor:
        """Outputs [tokens, width] for the inputs `rows` of a tree of tokens, computed in one step after those done.

        `parents[i]` is the index of the parent of token i, or -1 if it follows the tokens done. Call `keep` afterwards.
        """
        start, tree = self.done[request], Tree(tuple(parents))
        paths = [tuple(start + node for node in reversed(tree.path(token))) for token in range(len(parents))]
        contexts = [start + len(path) - 1 for path in paths]
        batch = RaggedBatch.of([1] * len(paths), contexts, _numbers, paths)
        self.store.reserve(request, start + len(paths))
        with torch.no_grad():
            return self._compute(rows, batch, self.store.view(batch, [request] * len(paths))[LAYER])

    def keep(self, request: int, path: Sequence[int]) -> None:
        """Keep these tokens of the tree, a path from its root, as the continuation of the request."""
        start = self.done[request]
        cast("TreeStore", self.store).accept_path(request, start, [start + node for node in path])
        self.done[request] += len(path)

    def _compute(self, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        layer = self.layer
        try:
            if self.case.mechanism.can(Capability.INCREMENTAL):
                stepped: Tensor = layer.step(rows, batch, state)
                return stepped
            return replay(layer, rows, batch, state)
        except (KeyError, RuntimeError) as error:
            require_states({LAYER: self.case.specs}, {LAYER: state}, error)
            raise


def replay(layer: Any, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """A step of a layer without `step`: the inputs are stored, and the full sequence is computed again."""
    inputs = state["inputs"]
    inputs.append({"x": rows})
    out = [layer(inputs.rows([r]).fields["x"])[0, -length:] for r, length in enumerate(batch.lengths)]
    return torch.cat(out)


def ragged(lengths: list[int], contexts: list[int], device: str | None = None) -> RaggedBatch:
    """A `RaggedBatch` with these lengths and contexts, and int64 tensors on the device (by default the CPU)."""
    return RaggedBatch.of(lengths, contexts, lambda values: torch.tensor(values, dtype=torch.int64, device=device))


def _numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
