"""How often tokens come, against the distribution written out, and against transformers' own processors."""

from __future__ import annotations

import pytest
import torch
from attn_core.kernels.sampling import TokenCounts
from attn_engine.sampler import SamplingRow, choose_tokens, process_logits
from attn_schema.sampling import ResolvedSamplingParams as Params

transformers = pytest.importorskip("transformers")

CHI_SQUARE_999 = 32.91
"""The 0.999 quantile of the chi-square distribution with 13 - 1 degrees of freedom."""


def chi_square(tokens: list[int], expected: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    likely = expected * len(tokens)
    return float(((counts - likely) ** 2 / likely)[expected > 0].sum())


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Params(temperature=1.0), lambda t: []),
        (Params(temperature=0.7), lambda t: [t.TemperatureLogitsWarper(0.7)]),
        (Params(temperature=1.0, typical_p=0.6), lambda t: [t.TypicalLogitsWarper(0.6)]),
        (Params(temperature=1.0, typical_p=0.2), lambda t: [t.TypicalLogitsWarper(0.2)]),
        (
            Params(temperature=1.4, top_k=8, top_p=0.9, min_p=0.05, typical_p=0.8),
            lambda t: [
                t.TemperatureLogitsWarper(1.4),
                t.TopKLogitsWarper(8),
                t.TopPLogitsWarper(0.9),
                t.MinPLogitsWarper(0.05),
                t.TypicalLogitsWarper(0.8),
            ],
        ),
    ],
    ids=["plain", "temperature", "typical", "most typical", "all"],
)
def test_sampled_tokens_pass_a_chi_square_test(sampling, warpers):
    logits = 1.5 * torch.randn(1, 13, generator=torch.Generator().manual_seed(2))
    scores = logits.double()
    for warper in warpers(transformers.generation.logits_process):
        scores = warper(None, scores)
    draws = 6000
    tokens = choose_tokens(logits.expand(draws, -1), [SamplingRow(sampling, 5, i) for i in range(draws)])
    assert chi_square(tokens, scores.softmax(-1)[0]) < CHI_SQUARE_999


def test_a_wrong_distribution_fails_the_chi_square_test():
    logits = 1.5 * torch.randn(1, 13, generator=torch.Generator().manual_seed(2))
    tokens = choose_tokens(logits.expand(6000, -1), [SamplingRow(Params(temperature=1.1), 5, i) for i in range(6000)])
    assert chi_square(tokens, logits.double().softmax(-1)[0]) > CHI_SQUARE_999


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_typical_sampling_keeps_what_transformers_keeps(mass):
    warper = transformers.generation.logits_process.TypicalLogitsWarper(mass)
    for seed in range(8):
        logits = 2 * torch.randn(1, 700, generator=torch.Generator().manual_seed(seed))
        kept = warper(None, logits.double())[0].isfinite()
        draws = [SamplingRow(Params(temperature=1.0, typical_p=mass), seed, i) for i in range(60)]
        chosen = choose_tokens(logits.expand(60, -1), draws)
        assert all(kept[token] for token in chosen)


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalties_and_the_least_length_are_those_of_transformers(penalty):
    process = transformers.generation.logits_process
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([[3, 7, 7, 29]])
    allowed = torch.ones(30, dtype=torch.bool)
    allowed[5] = False
    expected = process.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    expected = process.MinNewTokensLengthLogitsProcessor(4, 3, 5)(ids, expected)[0]
    occurred, params = TokenCounts(prompt=ids[0].tolist()), Params(repetition_penalty=penalty)
    found = process_logits(logits[0], SamplingRow(params, 0, 0, occurred, allowed))
    assert torch.allclose(found, expected)
