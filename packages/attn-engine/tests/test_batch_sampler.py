"""The sampler of whole batches chooses what that of single rows does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core.kernels.sampling import TokenCounts
from attn_engine import batch_sampler
from attn_engine.batch_sampler import choose_together, draw, may_fall_short
from attn_engine.batch_scores import BatchRow, TokenTally
from attn_engine.sampler import SamplingRow, choose_tokens, log_probabilities
from attn_schema.sampling import ResolvedSamplingParams as Params

PARAMS = [
    Params(temperature=0),
    Params(temperature=1.0),
    Params(temperature=1e-30),
    Params(temperature=0.6, min_p=0.03),
    Params(temperature=0.8, top_k=40),
    Params(temperature=0.8, top_k=1),
    Params(temperature=1.0, top_p=0.9),
    Params(temperature=2.0, top_p=0.999),
    Params(temperature=1.5, top_k=300, top_p=0.97, min_p=0.001),
    Params(temperature=0.9, typical_p=0.6),
    Params(temperature=0.9, typical_p=0.6, top_k=50),
    Params(temperature=0, logit_bias={3: 50.0, 4: 40.0}),
    Params(temperature=1.0, logit_bias={3: 5.0}),
    Params(temperature=0.7, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=0.3),
]


def single(row: BatchRow, size: int) -> SamplingRow:
    """The same row as the sampler of single rows takes it."""
    prompt = row.counts.noted if row.counts else 0
    penalized = row.seen is not None or row.counts is not None
    occurred = TokenCounts(row.tokens[:prompt], row.tokens[prompt:]) if penalized else None
    allowed = None if row.grammar is None else torch.from_numpy(row.grammar) > 0
    if row.suppressed:
        allowed = torch.ones(size, dtype=torch.bool) if allowed is None else allowed
        allowed[list(row.suppressed)] = False
    return SamplingRow(row.params, row.seed, row.position, occurred, allowed)


def rows_of(params: list[Params], size: int, seed: int) -> list[BatchRow]:
    """Rows with the penalties and constraints that their parameters ask for, and for some a constraint."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, one in enumerate(params):
        tokens = torch.randint(0, size, (7 * number + seed,), generator=generator).tolist()
        penalised = one.repetition_penalty != 1
        allowed = (torch.rand(size, generator=generator) < 0.7).byte().numpy()
        allowed[number % size] = 1
        found.append(
            BatchRow(
                one,
                seed + number,
                len(tokens),
                tokens,
                seen=TokenTally() if penalised else None,
                counts=TokenTally(noted=min(3, len(tokens))) if penalised else None,
                suppressed={(number + 1) % size, (number + 2) % size} if number % 4 == 1 else (),
                grammar=allowed if number % 3 == 2 else None,
            )
        )
    return found


def chosen(logits: torch.Tensor, rows: list[BatchRow]) -> list[int]:
    return [token for token, _, _ in choose_together(logits, rows)[0]]


def one_by_one(logits: torch.Tensor, rows: list[BatchRow]) -> list[int]:
    return choose_tokens(logits, [single(row, logits.shape[-1]) for row in rows])


@pytest.mark.parametrize("size", [5, 300, 3000])
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_of_all_kinds_of_rows_gets_the_tokens_that_each_would_get_alone(size, seed):
    params = list(PARAMS)
    if size < 10:
        params = [one for one in params if not one.logit_bias]
    logits = 3 * torch.randn(len(params), size, generator=torch.Generator().manual_seed(100 + seed))
    before = logits.clone()
    rows = rows_of(params, size, seed)
    expected = one_by_one(logits, rows)
    assert chosen(logits, rows) == expected
    assert torch.equal(logits, before)


def test_tallies_that_are_kept_from_step_to_step_give_what_new_ones_give():
    size, generator = 40, torch.Generator().manual_seed(8)
    params = [*PARAMS[-3:], PARAMS[-1].replace(seed=4), Params(temperature=0, presence_penalty=0.9)]
    rows = rows_of(params, size, 1)
    tokens = [list(row.tokens) for row in rows]
    rows = [dataclasses.replace(row, tokens=known) for row, known in zip(rows, tokens, strict=True)]
    rows[-1] = dataclasses.replace(rows[-1], counts=TokenTally(noted=2))
    prompts = [row.counts.noted if row.counts else 0 for row in rows]
    for number in range(12):
        rows = [dataclasses.replace(row, position=len(row.tokens)) for row in rows]
        logits = 2 * torch.randn(len(rows), size, generator=generator)
        anew = [
            dataclasses.replace(
                row,
                seen=row.seen and TokenTally(),
                counts=row.counts and TokenTally(noted=prompt),
                tokens=list(row.tokens),
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        here = [place for place in range(len(rows)) if (number + place) % 3]  # some wait, and join again
        found = chosen(logits[here], [rows[place] for place in here])
        assert found == one_by_one(logits[here], [anew[place] for place in here])
        for place, token in zip(here, found, strict=True):
            tokens[place] += [token, token] if number == 5 else [token]


@pytest.mark.parametrize("beside", [None, torch.tensor([5, -1])], ids=["alone", "beside others"])
def test_log_probabilities_come_with_the_tokens(monkeypatch, beside):
    monkeypatch.setattr(batch_sampler, "CANDIDATES", 4)
    asked = {0: 3, 2: 0, 3: 20, 5: 1}
    params = [Params(temperature=1.0, top_p=0.95, top_logprobs=asked.get(place)) for place in range(6)]
    logits = torch.randn(6, 15, generator=torch.Generator().manual_seed(3)) / 4
    logits[5, 7] = torch.nan
    rows = [BatchRow(one, place, place, [1] * place) for place, one in enumerate(params)]
    choices, others = choose_together(logits, rows, beside)
    assert others == ([] if beside is None else [5, -1])
    tokens = one_by_one(logits, rows)
    assert [token for token, _, _ in choices] == tokens
    for place, (token, own, top) in enumerate(choices):
        if place not in asked or token < 0:
            assert (own, list(top)) == (None, [])
            continue
        ((expected, likely),) = log_probabilities(logits[place : place + 1], [token], asked[place])
        assert (own, list(top)) == (expected, likely)


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_a_batch_of_one_kind_of_rows_gets_the_same_tokens_too(params):
    logits = 2 * torch.randn(9, 400, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    rows = [BatchRow(params, seed, 3 * seed, [2] * (3 * seed)) for seed in range(9)]
    assert chosen(logits, rows) == one_by_one(logits, rows)


def test_rows_for_which_the_candidates_do_not_suffice_are_chosen_among_all_tokens(monkeypatch):
    monkeypatch.setattr(batch_sampler, "CANDIDATES", 4)
    logits = torch.randn(8, 200, generator=torch.Generator().manual_seed(2)) / 4
    params = [
        Params(temperature=1.0, top_p=0.95),
        Params(temperature=0.7, top_k=60),
    ] * 4
    rows = [BatchRow(one, seed, seed, [1] * seed) for seed, one in enumerate(params)]
    found = chosen(logits, rows)
    assert found == one_by_one(logits, rows)
    assert len(set(found)) > 4


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_rows_that_cannot_fall_short_are_chosen_with_one_look(params, monkeypatch):
    monkeypatch.setattr(batch_sampler, "CANDIDATES", 40)
    logits = torch.randn(8, 200, generator=torch.Generator().manual_seed(2)) / 4
    logits[3] = torch.nan
    rows = [BatchRow(params, seed, seed, [1] * seed, greedy=params.greedy) for seed in range(8)]
    found = draw(logits, rows).tokens.tolist()
    assert may_fall_short(params) == (params.typical_p == 1 and (params.top_p < 1 or params.top_k > 40))
    if may_fall_short(params):
        found = [token if token >= -1 else other for token, other in zip(found, chosen(logits, rows), strict=True)]
    assert found == one_by_one(logits, rows)


def test_rows_without_a_finite_number_get_no_token():
    logits = torch.zeros(4, 50)
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    logits[3, 3] = torch.inf
    for params in PARAMS[:10]:
        found = chosen(logits, [BatchRow(params, 1, 1, [1]) for _ in range(4)])
        assert found[0] >= 0
        assert found[1:] == [-1, -1, -1]
