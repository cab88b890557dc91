"""The sampler of whole batches chooses what that of single rows does."""

from __future__ import annotations

import pytest
import torch
from attn_engine import SamplingParams, batch_sampler
from attn_engine.batch_sampler import choose_together
from attn_engine.sampler import SamplingRow, choose_tokens

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=0.6, min_p=0.03),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.97, min_p=0.001),
    SamplingParams(temperature=0.9, typical_p=0.6),
    SamplingParams(temperature=0.9, typical_p=0.6, top_k=50),
    SamplingParams(temperature=0, logit_bias={3: 50.0, 4: 40.0}),
    SamplingParams(temperature=1.0, logit_bias={3: 5.0}),
    SamplingParams(temperature=0.7, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=0.3),
]


def rows_of(params: list[SamplingParams], size: int, seed: int) -> list[SamplingRow]:
    """Rows with the penalties and constraints that their parameters ask for, and for some a constraint."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, one in enumerate(params):
        counts = torch.randint(0, 3, (size,), generator=generator).float()
        penalised = one.repetition_penalty != 1
        allowed = torch.rand(size, generator=generator) < 0.7 if number % 3 == 2 else None
        found.append(
            SamplingRow(
                one,
                seed + number,
                7 * number + seed,
                seen=counts > 0 if penalised else None,
                counts=counts if penalised else None,
                allowed=allowed,
            )
        )
    return found


@pytest.mark.parametrize("size", [5, 300, 3000])
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_of_all_kinds_of_rows_gets_the_tokens_that_each_would_get_alone(size, seed):
    params = list(PARAMS)
    if size < 10:
        params = [one for one in params if not one.logit_bias]
    logits = 3 * torch.randn(len(params), size, generator=torch.Generator().manual_seed(100 + seed))
    before = logits.clone()
    rows = rows_of(params, size, seed)
    assert choose_together(logits, rows) == choose_tokens(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_a_batch_of_one_kind_of_rows_gets_the_same_tokens_too(params):
    logits = 2 * torch.randn(9, 400, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    rows = [SamplingRow(params, seed, 3 * seed) for seed in range(9)]
    assert choose_together(logits, rows) == choose_tokens(logits, rows)


def test_rows_for_which_the_candidates_do_not_suffice_are_chosen_among_all_tokens(monkeypatch):
    monkeypatch.setattr(batch_sampler, "CANDIDATES", 4)
    logits = torch.randn(8, 200, generator=torch.Generator().manual_seed(2)) / 4
    params = [SamplingParams(temperature=1.0, top_p=0.95), SamplingParams(temperature=0.7, top_k=60)] * 4
    rows = [SamplingRow(one, seed, seed) for seed, one in enumerate(params)]
    chosen = choose_together(logits, rows)
    assert chosen == choose_tokens(logits, rows)
    assert len(set(chosen)) > 4


def test_rows_without_a_finite_number_get_no_token():
    logits = torch.zeros(4, 50)
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    logits[3, 3] = torch.inf
    for params in PARAMS[:10]:
        found = choose_together(logits, [SamplingRow(params, 1, 1) for _ in range(4)])
        assert found[0] >= 0
        assert found[1:] == [-1, -1, -1]
