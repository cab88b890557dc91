from __future__ import annotations

import torch
from attn_core import Causal
from attn_kernels_triton.attention.tiles import Choice
from attn_kernels_triton.paged.tiles import PagedChoice
from attn_kernels_triton.tuning import measure as measuring
from attn_kernels_triton.tuning import trials
from attn_kernels_triton.tuning.candidates import recurrence_name
from attn_kernels_triton.tuning.measure import best, measure

CPU = torch.device("cpu")


def tile(schedule: str) -> Choice:
    """A small tile for a schedule."""
    return Choice(16, 16, 4, 1, schedule)


def require_measured(monkeypatch, tried, expected: dict[str, tuple]) -> None:
    """Fail unless all candidates of kinds run, and one of each is the fastest."""
    monkeypatch.setattr(measuring, "WARMING", 0)
    found = list(measure(CPU, tried(CPU), repeats=1))
    fastest = best(found)
    assert fastest.keys() == expected.keys()
    for name, candidates in expected.items():
        assert [one.choice for one in found if one.name == name] == list(candidates)
        assert fastest[name] in candidates


def small_calls(monkeypatch) -> None:
    """Attention of one head over 20 tokens."""
    for name, value in {"MASKS": (Causal(),), "LENGTHS": (20,), "HEADS": 1}.items():
        monkeypatch.setattr(trials, name, value)


def test_every_candidate_of_a_forward_pass_runs_and_one_is_the_fastest(monkeypatch):
    small_calls(monkeypatch)
    candidates = tile("descriptors"), tile("descriptors")._replace(keys=32)
    monkeypatch.setattr(trials, "CANDIDATES", {64: candidates})
    require_measured(monkeypatch, trials.forward_trials, {"64 causal short": candidates})


def test_every_candidate_of_a_backward_pass_runs_and_one_is_the_fastest(monkeypatch):
    small_calls(monkeypatch)
    first, other = tile("descriptors"), tile("descriptors")._replace(keys=32)
    candidates = (first, first), (first, other)
    monkeypatch.setattr(trials, "BACKWARD", {64: candidates})
    require_measured(monkeypatch, trials.backward_trials, {"backward 64 causal short": candidates})


def test_every_candidate_of_decoding_runs_and_one_is_the_fastest(monkeypatch):
    monkeypatch.setattr(trials, "REQUESTS", 2)
    monkeypatch.setattr(trials, "CONTEXT", 70)
    candidates = PagedChoice(16, 4, 1), PagedChoice(32, 4, 1, times=2)
    monkeypatch.setattr(trials, "PAGED", {64: candidates})
    monkeypatch.setattr(trials, "SHAPES", {64: trials.Shape(4, 2, 16, 16)})
    require_measured(monkeypatch, trials.paged_trials, {"decode 64": candidates})


def test_every_candidate_of_latent_decoding_runs(monkeypatch):
    monkeypatch.setattr(trials, "REQUESTS", 1)
    monkeypatch.setattr(trials, "CONTEXT", 70)
    candidates = (PagedChoice(16, 4, 1),)
    monkeypatch.setattr(trials, "PAGED", {512: candidates})
    monkeypatch.setattr(trials, "SHAPES", {512: trials.Shape(4, 1, 48, 32, latent=True)})
    require_measured(monkeypatch, trials.paged_trials, {"decode 512": candidates})


def test_every_candidate_of_a_recurrence_runs_and_one_is_the_fastest(monkeypatch):
    for name, value in {"BATCH": 1, "TOKENS": 10, "RECURRENT_HEADS": 1, "SIZE": 16}.items():
        monkeypatch.setattr(trials, name, value)
    every = trials.RECURRENCES.items()
    expected = {recurrence_name(program, channels=apart): candidates for (program, apart), candidates in every}
    require_measured(monkeypatch, trials.recurrence_trials, expected)
