from __future__ import annotations

import pytest
import torch
from attn_core.kernels.sampling import Draw, TokenCounts
from attn_engine import Request
from attn_engine.sampler import SamplingRow, choose_tokens, uniform
from attn_schema.sampling import FILTERS
from attn_schema.sampling import ResolvedSamplingParams as Params
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make_engine, run, some_requests
from small_models import VOCABULARY, small_model

SETTINGS = st.builds(
    Params,
    temperature=st.floats(0.05, 3),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


def kept_by_the_definitions(logits, sampling: Params, seen) -> torch.Tensor:
    """Probabilities [vocabulary] after each filter in turn, sorted and cut in plain Python."""
    scores = logits.double().clone()
    if sampling.repetition_penalty != 1:
        for i in range(len(scores)):
            if seen[i]:
                scores[i] = (
                    scores[i] / sampling.repetition_penalty
                    if scores[i] > 0
                    else scores[i] * sampling.repetition_penalty
                )
    p = (scores / sampling.temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, kept, mass = sum(float(p[i]) for i in order), [], 0.0
    for i in order:
        if mass >= sampling.top_p * total and kept:
            break
        kept.append(i)
        mass += float(p[i])
    kept = [i for i in kept if p[i] >= sampling.min_p * p[kept[0]]]
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@settings(max_examples=150, deadline=None)
@given(
    sampling=SETTINGS, seed=st.integers(0, 2**64 - 1), draw_seed=st.integers(0, 999), size=st.sampled_from([5, 64, 700])
)
def test_only_tokens_that_all_filters_keep_are_chosen(sampling, seed, draw_seed, size):
    generator = torch.Generator().manual_seed(draw_seed)
    logits = 3 * torch.randn(1, size, generator=generator)
    seen = torch.rand(size, generator=generator) < 0.3
    occurred = TokenCounts(seen.nonzero().flatten().tolist())
    expected = kept_by_the_definitions(logits[0], sampling, seen)
    for position in range(3):
        (token,) = choose_tokens(logits, [SamplingRow(sampling, seed, position, occurred)])
        # A token at the very edge of a filter may fall to either side by rounding.
        assert expected[token] > 0 or abs(float(expected.sum()) - 1) > 1e-9 or _at_an_edge(expected, sampling)


def _at_an_edge(expected: torch.Tensor, sampling: Params) -> bool:
    ranked = expected.sort(descending=True).values.cumsum(0)
    return bool(((ranked - sampling.top_p).abs() < 1e-5).any())


@pytest.mark.parametrize(
    "sampling",
    [
        Params(temperature=1.0),
        Params(temperature=0.7, top_k=4),
        Params(temperature=1.3, top_p=0.8),
        Params(temperature=1.0, min_p=0.2),
        Params(temperature=0.9, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "top_k", "top_p", "min_p", "all"],
)
def test_tokens_come_as_often_as_their_probabilities_say(sampling):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = kept_by_the_definitions(logits[0], sampling, torch.zeros(12, dtype=torch.bool))
    draws = 4000
    tokens = choose_tokens(logits.expand(draws, -1), [SamplingRow(sampling, 11, i) for i in range(draws)])
    counts = torch.bincount(torch.tensor(tokens), minlength=12) / draws
    # Five standard deviations of the most variable count.
    assert (counts - expected).abs().max() < 5 * (0.25 / draws) ** 0.5
    assert counts[expected == 0].sum() == 0


def test_a_row_is_chosen_the_same_alone_and_beside_any_others():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, 400, generator=generator)
    kinds = [
        Params(),
        Params(temperature=1.0),
        Params(temperature=3.0, top_p=0.999),
        Params(temperature=0.8, top_k=5),
        Params(temperature=1.0, min_p=0.1),
        Params(repetition_penalty=1.5),
    ]
    occurred = TokenCounts((torch.rand(400, generator=generator) < 0.5).nonzero().flatten().tolist())
    draws = [SamplingRow(kinds[i % len(kinds)], i, 5, occurred) for i in range(40)]
    together = choose_tokens(logits, draws)
    assert together == [choose_tokens(logits[i : i + 1], [draws[i]])[0] for i in range(40)]


@pytest.mark.parametrize("name", sorted({*FILTERS} - {*Draw._fields}))
def test_a_filter_that_kernels_do_not_know_is_left_to_torch(name):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    row = SamplingRow(Params(temperature=1.0, **{name: 0.3}), 1, 1)
    assert choose_tokens(logits, [row], object()) == choose_tokens(logits, [row])


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e9])
def test_extreme_temperatures_choose_a_token(temperature):
    logits = torch.tensor([[1.0, 5.0, 3.0]])
    (token,) = choose_tokens(logits, [SamplingRow(Params(temperature=temperature), 1, 1)])
    assert token == 1 if temperature < 1 else token in {0, 1, 2}


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption():
    model = small_model("paged")
    requests = [
        Request(
            id=r.id,
            token_ids=r.token_ids,
            params=Params(max_new_tokens=20, temperature=1.5, seed=i, ignore_eos=True),
        )
        for i, r in enumerate(some_requests(model, 10, seed=6))
    ]
    alone = {r.id: run(make_engine(model), [r])[r.id].ids for r in requests}
    crowded = make_engine(model, "paged", tokens=96, max_num_batched_tokens=30)
    outcomes = run(crowded, requests)
    assert crowded.stats().preemptions > 0
    assert {name: outcome.ids for name, outcome in outcomes.items()} == alone
    assert len({tuple(ids) for ids in alone.values()}) == len(requests)


def test_without_a_seed_two_runs_differ():
    model = small_model("paged")
    task = Params(max_new_tokens=30, temperature=2.0, ignore_eos=True)
    outcomes = run(make_engine(model), [Request(id=name, token_ids=(1, 2), params=task) for name in ("a", "b")])
    assert outcomes["a"].ids != outcomes["b"].ids


def test_a_large_repetition_penalty_never_repeats():
    model = small_model("paged")
    request = Request(
        id="x",
        token_ids=(1, 2, 3),
        params=Params(max_new_tokens=50, repetition_penalty=1000, ignore_eos=True),
    )
    ids = run(make_engine(model), [request])["x"].ids
    # Logits that are negative for every unseen token would make a seen one win; these are not.
    assert len(set(ids) | {1, 2, 3}) == 53


def test_log_probabilities_are_those_of_log_softmax():
    model = small_model("paged")
    kept = []
    logits_of = model.logits
    model.logits = lambda hidden: kept.append(logits_of(hidden)) or kept[-1]
    task = Params(max_new_tokens=8, temperature=1.2, top_k=20, seed=3, top_logprobs=4, ignore_eos=True)
    outcome = run(make_engine(model), [Request(id="x", token_ids=(5, 6), params=task)])["x"]
    for token, logits in zip(outcome.tokens, kept, strict=True):
        expected = torch.log(logits[0].exp() / logits[0].exp().sum())
        assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-5)
        best = sorted(range(VOCABULARY), key=lambda i: -float(expected[i]))[:4]
        assert [t.id for t in token.top_logprobs] == best
        assert [t.logprob for t in token.top_logprobs] == pytest.approx([float(expected[i]) for i in best], abs=1e-5)


def test_log_probabilities_come_only_where_asked_for():
    model = small_model("paged")
    tasks = {"none": None, "own": 0, "two": 2}
    outcomes = run(
        make_engine(model),
        [
            Request(id=n, token_ids=(1,), params=Params(max_new_tokens=2, top_logprobs=a, ignore_eos=True))
            for n, a in tasks.items()
        ],
    )
    assert all(token.logprob is None for token in outcomes["none"].tokens)
    assert all(token.logprob is not None and token.top_logprobs == () for token in outcomes["own"].tokens)
    assert all(len(token.top_logprobs) == 2 for token in outcomes["two"].tokens)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_chance_is_a_share_of_one_and_repeatable(seed, position):
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_chance_is_even():
    numbers = torch.tensor([uniform(7, i) for i in range(4000)])
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert (counts - 400).abs().max() < 100


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_greedy_token_is_the_first_of_the_most_likely(size, dtype):
    # Few different values, so that most rows have ties.
    logits = torch.randint(-2, 2, (30, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert choose_tokens(logits, [SamplingRow(Params(), 0, 0)] * 30) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling",
    [
        Params(),
        Params(temperature=1.0),
        Params(temperature=1.0, top_p=0.5),
    ],
)
def test_a_row_that_is_not_numbers_is_told_apart_from_its_neighbours(bad, sampling):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    healthy = choose_tokens(logits, [SamplingRow(sampling, 1, 1)] * 3)
    logits[1, 290] = bad
    assert choose_tokens(logits, [SamplingRow(sampling, 1, 1)] * 3) == [healthy[0], -1, healthy[2]]


def test_every_position_has_its_own_chance():
    model = small_model("paged")
    task = Params(max_new_tokens=60, temperature=1e9, seed=1, ignore_eos=True)
    ids = run(make_engine(model), [Request(id="x", token_ids=(1,), params=task)])["x"].ids
    # 60 even draws of 64 tokens show 39 different ones on average, with a deviation of 3.
    assert 24 < len(set(ids)) < 54
