"""Steps with prompts over inputs in place give the tokens of steps made anew, in whatever chunks and company.

The very steps that a GPU repeats are computed here on the CPU, in float64.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from attn_engine import Request, SamplingParams
from attn_engine.graphs import MIN_TOKENS, PROMPTS, Rerun, StepGraphs, StepLimits, prompt_sizes
from serving import assert_empty, make_engine, run, some_requests
from small_models import VOCABULARY, InPlace, Linear, SmallModel, Softmax

KINDS = {
    "paged": lambda: (InPlace(), InPlace()),
    "window": lambda: (InPlace(window=7), InPlace()),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
MOST = 64
"""Tokens of the largest step that is recorded."""


def model_of(*layers) -> SmallModel:
    torch.manual_seed(7)
    return SmallModel(*layers).double().eval()


def with_graphs(engine, model, most: int = MOST) -> StepGraphs:
    """What steps are repeated by, once an engine does so."""
    engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(most, 8))
    return engine._runner.graphs


def sizes_of(graphs: StepGraphs) -> list[int]:
    """The numbers of tokens of recorded steps with prompts."""
    return [size for kind, size in graphs._graphs if kind == PROMPTS]


def recorded(model, **options):
    """An engine that repeats all steps, and fails at any other, with what they are repeated by."""
    engine = make_engine(model, **{"max_num_batched_tokens": MOST} | options)
    graphs = with_graphs(engine, model)

    def refuse(*_):
        raise AssertionError("a step was not repeated")

    engine._runner._batch = refuse
    return engine, graphs


def ids_of(outcomes):
    assert [outcome.error for outcome in outcomes.values()] == [None] * len(outcomes)
    return {name: outcome.ids for name, outcome in outcomes.items()}


def prompts_of(*lengths: int) -> list[Request]:
    params = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        Request(id=str(number), token_ids=tuple(tokens[sum(lengths[:number]) :][:length]), params=params)
        for number, length in enumerate(lengths)
    ]


@EVERY_KIND
@pytest.mark.parametrize("cache", ["paged", "shared"])
@pytest.mark.parametrize("most", [13, 40], ids=["small chunks", "large chunks"])
@pytest.mark.parametrize("every", [0, 3], ids=["a crowd", "joining one by one"])
def test_repeated_steps_with_prompts_give_the_tokens_of_steps_made_anew(kind, cache, most, every):
    model = model_of(*KINDS[kind]())
    requests = some_requests(model, 10, seed=2)
    expected = ids_of(run(make_engine(model, cache), requests))
    engine, graphs = recorded(model, cache=cache, requests=6, max_num_batched_tokens=most)
    assert ids_of(run(engine, requests, every=every)) == expected
    assert not graphs.reasons
    assert graphs.replayed[PROMPTS] > 5
    assert_empty(engine)


@EVERY_KIND
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 64])
def test_prompts_as_long_as_a_recorded_step_or_one_token_more_or_less_change_nothing(kind, length):
    model = model_of(*KINDS[kind]())
    (request,) = prompts_of(length)
    engine, graphs = recorded(model, cache="paged")
    assert ids_of(run(engine, [request])) == ids_of(run(make_engine(model, "paged"), [request]))
    assert sizes_of(graphs) == ([token_size(length)] if length > 1 else [])


def token_size(count: int) -> int:
    return next(size for size in prompt_sizes(MOST) if size >= count)


@EVERY_KIND
def test_preemption_and_prompts_computed_again_change_nothing(kind):
    model = model_of(*KINDS[kind]())
    requests = some_requests(model, 12, seed=1)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine, _ = recorded(model, cache="paged", tokens=96, max_num_batched_tokens=40)
    assert ids_of(run(engine, requests)) == expected
    assert engine.stats().preemptions > 0
    assert_empty(engine)


@EVERY_KIND
def test_prompts_that_go_on_behind_cached_blocks_are_repeated_too(kind):
    model = model_of(*KINDS[kind]())
    prompt = tuple(range(40))
    requests = [
        Request(id=one.id, token_ids=(*prompt, *one.token_ids), params=one.params) for one in prompts_of(5, 9, 2, 30)
    ]
    expected = {one.id: run(make_engine(model, "paged"), [one])[one.id].ids for one in requests}
    engine, _ = recorded(model, cache="shared")
    found = {}
    for one in requests:
        found |= ids_of(run(engine, [one]))
    assert found == expected
    assert engine.stats().cached_tokens > 0


def test_draft_tokens_are_verified_in_repeated_steps():
    model = model_of(InPlace(), InPlace())
    requests = [
        Request(id="a", token_ids=(1, 2, 3, 4) * 5, params=SamplingParams(max_new_tokens=20, ignore_eos=True)),
        *prompts_of(7, 20),
    ]
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine, _ = recorded(model, cache="paged", num_speculative_tokens=3)
    assert ids_of(run(engine, requests)) == expected
    assert engine.stats().draft_tokens > 0


def test_scores_of_prompts_come_of_repeated_steps_as_of_others():
    model = model_of(InPlace(), InPlace())
    one = some_requests(model, 1, seed=5, temperature=0, top_logprobs=3)
    engine, _ = recorded(model, cache="paged")
    expected, found = (run(each, one)["r0"].tokens for each in (make_engine(model, "paged"), engine))
    assert [token.id for token in found] == [token.id for token in expected]
    for token, other in zip(found, expected, strict=True):
        assert token.logprob == pytest.approx(other.logprob)


def test_what_padding_writes_is_where_nobody_reads():
    """Whatever lies there, numbers or not."""
    model = model_of(InPlace(), InPlace())
    requests = some_requests(model, 6, seed=3)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine, graphs = recorded(model, cache="paged")
    cache = engine._store._kv_cache
    scrap = slice((1 + cache.num_blocks) * cache.block_size, None)
    for fields in cache.memory.values():
        for rows in fields.values():
            rows[scrap] = float("nan")
    graphs.record_all()
    for fields in cache.memory.values():
        for rows in fields.values():
            assert not rows[: scrap.start].any()
            rows[scrap] = float("nan")
    assert ids_of(run(engine, requests)) == expected


def test_recording_leaves_the_states_of_running_requests_alone():
    """Sizes are first met, and recorded, while others are in the middle of their text."""
    model = model_of(InPlace(), InPlace(window=7))
    requests = some_requests(model, 10, seed=4)
    expected = {one.id: run(make_engine(model, "paged"), [one])[one.id].ids for one in requests}
    engine, graphs = recorded(model, cache="paged")
    assert ids_of(run(engine, requests, every=2)) == expected
    assert len(sizes_of(graphs)) > 1


def test_steps_of_more_tokens_than_are_recorded_are_made_anew():
    model = model_of(InPlace(), InPlace())
    requests = prompts_of(40, 30, 9)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine = make_engine(model, "paged", max_num_batched_tokens=128)
    graphs = with_graphs(engine, model, most=32)
    assert ids_of(run(engine, requests)) == expected
    assert (graphs.replayed[PROMPTS], graphs.reasons) == (0, {})


@pytest.mark.parametrize(
    ("layers", "why"),
    [((InPlace(), Linear()), "states of fixed size"), ((Softmax(), InPlace()), "on the host|are gathered")],
    ids=["a recurrence", "rows that are gathered"],
)
def test_models_whose_prompts_cannot_be_recorded_say_so_once_and_run(layers, why, caplog):
    model = model_of(*layers)
    requests = some_requests(model, 6, seed=2)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine = make_engine(model, "paged", max_num_batched_tokens=MOST)
    with_graphs(engine, model)
    with caplog.at_level(logging.WARNING):
        assert ids_of(run(engine, requests)) == expected
    warnings = [text for text in caplog.messages if text.startswith("steps with prompts run eagerly")]
    assert len(warnings) == 1
    assert engine.eager_reasons[PROMPTS] in warnings[0]
    assert warnings[0] in engine.note
    assert any(part in engine.eager_reasons[PROMPTS] for part in why.split("|"))


def test_a_recording_that_fails_is_said_and_steps_are_made_anew(caplog):
    class Broken:
        def record(self, _):
            raise RuntimeError("out of graphs")

    model = model_of(InPlace())
    requests = prompts_of(20, 3)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine = make_engine(model, "paged")
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Broken(), StepLimits(MOST, 8))
    with caplog.at_level(logging.WARNING):
        assert ids_of(run(engine, requests)) == expected
    assert set(graphs.reasons.values()) == {"recording failed: RuntimeError: out of graphs"}
    assert len([text for text in caplog.messages if "run eagerly" in text]) == len(graphs.reasons) == 2


@pytest.mark.parametrize("most", [1, 15, 16, 17, 100, 512, 2048, 8192])
def test_sizes_end_at_the_most_and_waste_no_more_than_a_quarter(most):
    sizes = prompt_sizes(most)
    assert sizes[-1] == most
    assert all(second - first <= max(MIN_TOKENS, first / 4) for first, second in pairwise(sizes))
    assert len(sizes) <= 32
    assert prompt_sizes(0) == ()
