from __future__ import annotations

import torch
from attn_core import Causal
from attn_kernels_triton.attention.tiles import Choice
from attn_kernels_triton.tuning import measure as measuring
from attn_kernels_triton.tuning.measure import best, measure


def test_every_candidate_of_every_kind_runs_and_one_of_each_is_the_fastest(monkeypatch):
    candidates = tuple(Choice(16, 16, 4, 1, schedule) for schedule in ("descriptors", "specialised"))
    monkeypatch.setattr(measuring, "CANDIDATES", {16: candidates})
    monkeypatch.setattr(measuring, "MASKS", (Causal(),))
    monkeypatch.setattr(measuring, "HEADS", 1)
    monkeypatch.setattr(measuring, "WARMING", 0)
    found = list(measure(torch.device("cpu"), lengths=(20,), repeats=1))
    assert [one.choice for one in found] == list(candidates)
    assert next(iter(best(found).values())) in candidates
