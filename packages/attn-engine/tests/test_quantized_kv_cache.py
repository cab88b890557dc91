"""With states in few bits, too, a request gives the same tokens alone, in a crowd and after a preemption."""

from __future__ import annotations

import random
from functools import cache

import pytest
from attn_cache import Int4Cache, Int8Cache, KiviCache, KiviLayout
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams
from serving import assert_empty, run
from small_models import LETTERS, VOCABULARY, small_model

FAMILIES = {"int8": Int8Cache(), "int4": Int4Cache(), "kivi": KiviCache(KiviLayout(block=8, group=4))}
EVERY = pytest.mark.parametrize("family", FAMILIES)
KINDS = pytest.mark.parametrize("kind", ["paged", "hybrid"])


def engine_of(kind: str, family: str, *, tokens: int = 96 * 8, max_num_batched_tokens: int = 256) -> Engine:
    model = small_model(kind)
    store = FAMILIES[family].create(model.state_specs(), StoreSize(tokens=tokens, requests=8, dtype="float64"))
    return Engine(model, store, LETTERS, EngineConfig(max_num_batched_tokens=max_num_batched_tokens))


def asked(kind: str, scope: str | None = "") -> list[Request]:
    rng = random.Random(2)
    common = [rng.randrange(VOCABULARY) for _ in range(20)]
    return [
        Request(
            id=f"r{i}",
            token_ids=(*common[: rng.randint(1, 20)], *(rng.randrange(VOCABULARY) for _ in range(9))),
            params=SamplingParams(max_new_tokens=rng.randint(5, 20), ignore_eos=True),
            encoder_token_ids=(3, 1, 4) if kind == "hybrid" else None,
            scope=scope,
        )
        for i in range(8)
    ]


@cache
def alone(kind: str, family: str) -> dict[str, list[int]]:
    return {request.id: run(engine_of(kind, family), [request])[request.id].ids for request in asked(kind)}


@KINDS
@EVERY
@pytest.mark.parametrize("scope", [None, ""])
def test_a_crowd_with_prompts_in_chunks_and_common_beginnings_changes_nothing(kind, family, scope):
    engine = engine_of(kind, family, max_num_batched_tokens=11)
    outcomes = run(engine, asked(kind, scope), every=2)
    assert {name: outcome.ids for name, outcome in outcomes.items()} == alone(kind, family)
    assert (engine.stats().cached_tokens > 0) == (scope is not None)
    assert_empty(engine)


@KINDS
@EVERY
def test_preemption_changes_nothing_though_what_was_decoded_is_computed_again_as_a_prompt(kind, family):
    engine = engine_of(kind, family, tokens=96, max_num_batched_tokens=40)
    outcomes = run(engine, asked(kind, None))
    assert engine.stats().preemptions > 0
    assert {name: outcome.ids for name, outcome in outcomes.items()} == alone(kind, family)
    assert_empty(engine)
