"""A store written with dictionaries: the oracle that both stores must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from attn_core import Field, Paged, RaggedBatch, Slot, Source
from attn_core.stores import ModelSpecs, StateStore

WINDOW = 20

SPECS: ModelSpecs = {
    "full": {"kv": Paged({"key": Field((2, 3)), "value": Field((2, 5))})},
    "twin": {"kv": Paged({"key": Field((2, 3)), "value": Field((2, 5))})},
    "near": {"kv": Paged({"x": Field((4,), "float64")}, window=WINDOW)},
    "sums": {"total": Slot({"s": Field((2, 2)), "z": Field((), "float64")})},
    "cross": {"source": Source({"memory": Field((3,))})},
}
TOKEN_STATES = [("full", "kv"), ("twin", "kv"), ("near", "kv")]


def ragged(lengths: list[int], contexts: list[int]) -> RaggedBatch:
    return RaggedBatch.of(lengths, contexts, lambda values: torch.tensor(values, dtype=torch.int64))


def rows_for(state: tuple[str, str], tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fields = SPECS[state[0]][state[1]].fields
    return {
        name: torch.randn(tokens, *spec.shape, generator=generator).to(getattr(torch, spec.dtype or "float32"))
        for name, spec in fields.items()
    }


@dataclass
class Remembered:
    """One request as the oracle sees it: every row ever appended, the fixed state and the source."""

    rows: dict[tuple[str, str], list[dict[str, torch.Tensor]]] = field(
        default_factory=lambda: {state: [] for state in TOKEN_STATES}
    )
    fixed: dict[str, torch.Tensor] = field(
        default_factory=lambda: {"s": torch.zeros(2, 2), "z": torch.zeros((), dtype=torch.float64)}
    )
    source: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 3))

    @property
    def context(self) -> int:
        return len(self.rows["full", "kv"])


class Oracle:
    """Drives a store and the dictionaries side by side and compares everything that can be read."""

    def __init__(self, store: StateStore, seed: int = 0) -> None:
        self.store = store
        self.running: dict[int, Remembered] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def admit(self, request: int, source: int) -> bool:
        if not self.store.admit(request):
            return False
        known = Remembered(source=torch.randn(source, 3, generator=self.generator))
        self.store.write_source(request, {"cross": {"source": {"memory": known.source}}})
        self.running[request] = known
        return True

    def release(self, request: int) -> None:
        self.store.release(request)
        del self.running[request]

    def step(self, lengths: dict[int, int], poison: frozenset[int] = frozenset()) -> None:
        """Append so many rows to each request (NaN to the poisoned), then compare all reads."""
        names = self.store.order(list(lengths))
        contexts = [self.running[name].context for name in names]
        batch = ragged([lengths[name] for name in names], contexts)
        views = self.store.view(batch, names)
        for state in TOKEN_STATES:
            rows = rows_for(state, sum(lengths.values()), self.generator)
            for span in batch.spans():
                if names[span.request] in poison:
                    for tensor in rows.values():
                        tensor[span.start : span.stop] = torch.nan
                for i in range(span.start, span.stop):
                    self.running[names[span.request]].rows[state].append({n: t[i] for n, t in rows.items()})
            views[state[0]][state[1]].append(rows)
        for requests in [list(range(len(names))), *([r] for r in range(len(names))), list(range(len(names)))[::-2]]:
            for state in TOKEN_STATES:
                self.compare_rows(
                    views[state[0]][state[1]].rows(requests), [names[r] for r in requests], state, lengths
                )
            self.compare_source(views["cross"]["source"].rows(requests), [names[r] for r in requests])
        self.compare_fixed(views["sums"]["total"], names, poison)

    def compare_rows(self, read, names: list[int], state: tuple[str, str], lengths: dict[int, int]) -> None:
        window = SPECS[state[0]][state[1]].window
        for r, name in enumerate(names):
            known = self.running[name].rows[state]
            first = 0 if window is None else max(0, len(known) - lengths[name] - window + 1)
            key_padding_mask = (
                torch.ones_like(read.positions[r], dtype=torch.bool)
                if read.key_padding_mask is None
                else read.key_padding_mask[r]
            )
            assert read.positions[r][key_padding_mask].tolist() == list(range(first, len(known)))
            for field_name, tensor in read.fields.items():
                expected = torch.stack([row[field_name] for row in known[first:]])
                assert torch.equal(tensor[r][key_padding_mask].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
                if not expected.isnan().any():
                    assert not tensor[r].isnan().any(), "padding shows what another request has left behind"

    def compare_source(self, read, names: list[int]) -> None:
        for r, name in enumerate(names):
            known = self.running[name].source
            key_padding_mask = (
                torch.ones_like(read.positions[r], dtype=torch.bool)
                if read.key_padding_mask is None
                else read.key_padding_mask[r]
            )
            assert read.positions[r][key_padding_mask].tolist() == list(range(len(known)))
            assert torch.equal(read.fields["memory"][r][key_padding_mask], known)
            assert not read.fields["memory"][r].isnan().any()

    def compare_fixed(self, view, names: list[int], poison: frozenset[int]) -> None:
        read = view.read()
        for r, name in enumerate(names):
            for field_name, known in self.running[name].fixed.items():
                assert torch.equal(read[field_name][r].nan_to_num(nan=7.0), known.nan_to_num(nan=7.0))
        fresh = rows_for(("sums", "total"), len(names), self.generator)
        for r, name in enumerate(names):
            if name in poison:
                for tensor in fresh.values():
                    tensor[r] = torch.nan
            self.running[name].fixed = {field_name: tensor[r] for field_name, tensor in fresh.items()}
        view.write(fresh)
