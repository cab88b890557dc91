"""A draw is the inverse of the cumulative distribution at one point, whatever the size of the vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attn_engine.sampler import sample_token
from attn_schema.sampling import ResolvedSamplingParams as Params


def kept_by_the_definition(scores, sampling):
    """Tokens and their shares in the order in which they are summed, in plain Python: (ids, shares)."""
    highest = max(map(float, scores))
    weights = [math.exp((float(score) - highest) / sampling.temperature) for score in scores]
    ranked = sampling.top_k or sampling.top_p < 1
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i)) if ranked else range(len(weights))
    kept = list(order)[: sampling.top_k or None]
    whole, mass, cut = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if mass >= sampling.top_p * whole and ranked:
            break
        cut.append(i)
        mass += weights[i]
    cut = [i for i in cut if weights[i] >= sampling.min_p]
    total = sum(weights[i] for i in cut)
    return cut, [weights[i] / total for i in cut]


@pytest.mark.parametrize("size", [3, 256, 1000, 6000])
@pytest.mark.parametrize(
    "sampling",
    [
        Params(temperature=1.0),
        Params(temperature=0.6, min_p=0.03),
        Params(temperature=0.8, top_k=40),
        Params(temperature=1.0, top_p=0.9),
        Params(temperature=2.0, top_p=0.999),
        Params(temperature=1.5, top_k=900, top_p=0.97, min_p=0.001),
    ],
    ids=["plain", "min_p", "top_k", "top_p", "nearly all", "all filters"],
)
def test_a_point_falls_on_the_token_at_which_the_sum_passes_it(size, sampling):
    scores = 2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    ids, shares = kept_by_the_definition(scores, sampling)
    ends = np.cumsum(shares)
    for point in np.linspace(0, 1, 97, endpoint=False):
        place = ids.index(sample_token(scores, sampling, float(point)))
        # Weights are float32: a point this near to an end may fall to either side.
        assert ends[place] - shares[place] - 1e-5 <= point <= ends[place] + 1e-5


def test_what_has_no_weight_is_not_drawn_even_at_the_very_end():
    scores = torch.full((1000,), -torch.inf)
    scores[[3, 700]] = 1.0
    drawn = {sample_token(scores, Params(temperature=1.0), point) for point in (0.0, 0.4, 0.6, 1 - 2**-53)}
    assert drawn == {3, 700}


@pytest.mark.parametrize("sick", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Params(temperature=1.0), Params(temperature=1.0, top_k=2)])
def test_scores_that_are_no_numbers_give_no_token(sick, sampling):
    scores = torch.tensor([0.0, sick, 1.0])
    assert sample_token(scores, sampling, 0.5) == -1
    assert sample_token(torch.full((3,), -torch.inf), sampling, 0.5) == -1
