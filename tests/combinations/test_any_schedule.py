"""Whatever the schedule, every decoder and models of other kinds give each request the tokens it gets alone."""

from __future__ import annotations

from functools import cache

import pytest
from attn_cache.encoder_states import EncoderStates
from attn_core.errors import Unavailable
from attn_engine import Engine, EngineConfig, Request, SamplingParams, build_engine
from cases import kind_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_mechanism_is_trained_and_served import MECHANISMS, PAPERS
from test_every_mechanism_is_trained_and_served import served as decoder
from test_models_with_a_source_are_served import model as source_model
from test_recurrent_models_are_served import model as recurrent_model

VOCABULARY = 32
KINDS = {
    **{name: (decoder, name) for name in (*MECHANISMS, *PAPERS)},
    **{name: (source_model, name) for name in ("rnnsearch", "transformer")},
    **{name: (recurrent_model, name) for name in ("key_value_lm", "lstmn_lm")},
}
ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "stem": st.integers(0, 1),
            "shared": st.integers(1, 40),
            "own": st.integers(0, 6),
            "new": st.integers(1, 6),
            "steps": st.integers(0, 3),
            "aborted": st.booleans(),
            "priority": st.integers(0, 1),
        }
    ),
    min_size=2,
    max_size=6,
)
"""Requests in their order: beginnings they share, how many steps pass before the next one comes, or this one goes."""


def built(kind):
    maker, name = KINDS[kind]
    return maker(name)


def request(kind, number, arrival):
    stem = [(7 * i + 3 * i * i + 11 * arrival["stem"]) % VOCABULARY for i in range(arrival["shared"])]
    own = [(13 * number + 5 * i) % VOCABULARY for i in range(arrival["own"])]
    source = (1 + arrival["stem"], 5, 9) if hasattr(built(kind), "max_encoder_len") else None
    task = SamplingParams(max_new_tokens=arrival["new"], ignore_eos=True)
    ids = (*stem, *own)
    return Request(
        id=f"r{number}", token_ids=ids, encoder_token_ids=source, params=task, scope="s", priority=arrival["priority"]
    )


@cache
def alone(kind, token_ids, encoder_token_ids, new):
    """The tokens of a request that has an engine for itself."""
    engine = build_engine(built(kind), config=EngineConfig(max_num_seqs=1))
    task = SamplingParams(max_new_tokens=new, ignore_eos=True)
    engine.submit(Request(id="x", token_ids=token_ids, encoder_token_ids=encoder_token_ids, params=task))
    made = []
    while not engine.idle:
        made += [token.id for event in engine.step() for token in event.delta.tokens]
    return made


class Listener:
    """What an engine told of each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}

    def step(self):
        for event in self.engine.step():
            self.tokens.setdefault(event.request_id, []).extend(token.id for token in event.delta.tokens)
            assert not event.ended or event.delta.finish_reason or isinstance(event.error, Unavailable)


def assert_nothing_is_left(engine):
    usage = engine._store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)
    held = engine._store._encoder
    assert isinstance(held, EncoderStates)
    assert not held._requests
    assert not engine._scheduler.waiting


@pytest.mark.sweep(lambda kind: kind_of(kind))
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(arrivals=ARRIVALS, max_num_batched_tokens=st.integers(3, 40), cache_name=st.sampled_from(["shared", "paged"]))
def test_any_schedule_gives_the_tokens_of_each_request_alone_and_leaves_nothing(
    kind, arrivals, max_num_batched_tokens, cache_name
):
    # Room for one and a half of the longest: some wait, some are thrown out and computed again.
    limits = EngineConfig(max_num_batched_tokens=max_num_batched_tokens)
    engine = build_engine(built(kind), config=limits.replace(kv_cache=cache_name, max_num_seqs=3), kv_cache_tokens=80)
    listener, asked, aborted = Listener(engine), {}, set()
    for number, arrival in enumerate(arrivals):
        one = request(kind, number, arrival)
        asked[one.id] = one
        engine.submit(one)
        for _ in range(arrival["steps"]):
            listener.step()
        if arrival["aborted"] and engine.cancel(one.id):
            aborted.add(one.id)
    while not engine.idle:
        listener.step()
    for name, one in asked.items():
        expected, told = (
            alone(kind, one.token_ids, one.encoder_token_ids, one.params.max_new_tokens),
            listener.tokens.get(name, []),
        )
        assert told == (expected[: len(told)] if name in aborted else expected)
    assert_nothing_is_left(engine)
