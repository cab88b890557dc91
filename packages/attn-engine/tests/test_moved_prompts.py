"""A prompt that one engine computes and another one completes: the tokens of one engine, for every kind of state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attn_cache import KiviCache, KiviLayout, SharedCache
from attn_cache.prefix_cache import SharedStore
from attn_core import installed
from attn_core.errors import DeadlineExceeded, Incompatible, InvalidValue
from attn_core.models import PromptEmbeddings
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, PromptState, Request, SamplingParams, StructuredOutput
from attn_schema import PartialCompletion, Resumption, ScoringParams
from serving import Outcome, assert_empty, make_engine, run_all
from small_models import JSON, KINDS, LETTERS, Bytes, small_model

PROMPT = tuple(range(3, 60, 2))
SOURCE = (5, 1, 4)
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}'
SAMPLED = {"temperature": 1.3, "seed": 7}
CASES: dict[str, tuple[str, str, dict, Bytes]] = {
    **{f"greedy {kind}": (kind, "shared", {}, LETTERS) for kind in KINDS},
    **{f"greedy in {cache}": ("window", cache, {}, LETTERS) for cache in ("contiguous", "paged", "int8", "int4")},
    "sampled": ("paged", "shared", {**SAMPLED, "top_p": 0.95}, LETTERS),
    "several with log probabilities": ("hybrid", "shared", {**SAMPLED, "n": 3, "top_logprobs": 2}, LETTERS),
    "several without forks": ("slot", "contiguous", {**SAMPLED, "n": 3}, LETTERS),
    "penalties": ("window", "paged", {**SAMPLED, "repetition_penalty": 1.4, "frequency_penalty": 0.9}, LETTERS),
    "stop strings": ("slot", "shared", {**SAMPLED, "stop": ("a", "7")}, LETTERS),
    "drafts": ("paged", "shared", {"num_speculative_tokens": 4}, LETTERS),
    "structured": (
        "hybrid",
        "shared",
        {**SAMPLED, "ignore_eos": False, "structured_output": StructuredOutput(json_schema=SCHEMA)},
        JSON,
    ),
    "beams": ("hybrid", "shared", {"num_beams": 3, "n": 2}, LETTERS),
}


def ask(kind: str, sampling: dict, name: str = "asked", prompt: tuple[int, ...] = PROMPT) -> Request:
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 12} | sampling)
    source = SOURCE if kind in ("source", "hybrid") else None
    return Request(id=name, token_ids=prompt, encoder_token_ids=source, params=params)


def state_of(engine: Engine, request: Request) -> PromptState:
    """The state of a prompt, which the engine has forgotten by then."""
    engine.submit(request.prefill())
    found = []
    while not engine.idle:
        found += engine.step()
    (output,) = found
    assert output.error is None, output.error
    assert (output.last, output.delta.tokens, output.delta.text) == (True, (), "")
    assert_empty(engine)
    return output.state


def told(outcomes: dict[tuple[str, int], Outcome]) -> dict:
    """What requests returned, with log probabilities rounded: they are computed in other batches."""
    return {
        name: (
            one.ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            one.score and round(one.score, 9),
            [round(token.logprob, 9) for token in one.tokens if token.logprob is not None],
        )
        for name, one in outcomes.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_one_engine(case: str) -> None:
    kind, cache, sampling, tokenizer = CASES[case]
    model = small_model(kind)
    make = lambda: make_engine(model, cache, tokenizer=tokenizer, max_num_batched_tokens=17)  # noqa: E731
    request, others = ask(kind, sampling), [ask(kind, SAMPLED, f"other {i}", PROMPT[i:]) for i in range(3)]
    wanted = run_all(make(), [request])
    prefill, decode = make(), make()
    state = state_of(prefill, request)
    assert state.tokens == len(PROMPT) - 1 == prefill.stats().computed_tokens
    for beside in ([], others):
        outcomes = run_all(decode, [*beside, replace(request, state=state)])
        found = {name: one for name, one in outcomes.items() if name[0] == request.id}
        assert told(found) == told(wanted)
        assert next(one.usage for one in found.values() if one.usage).prompt_tokens == len(PROMPT)
    assert decode.stats().imported_tokens == 2 * state.tokens
    assert decode.stats().offloaded_bytes == 0
    assert_empty(decode)


@pytest.mark.parametrize("kind", ["paged", "window", "hybrid"])
def test_codes_of_whole_blocks_and_the_rows_after_them_move_too(kind: str) -> None:
    family, model = KiviCache(KiviLayout(block=8, group=4)), small_model(kind)
    size = StoreSize(tokens=96 * 8, requests=8, dtype="float64")

    def make() -> Engine:
        return Engine(model, family.create(model.state_specs(), size), LETTERS)

    request = ask(kind, {})
    state = state_of(make(), request)
    decode = make()
    assert told(run_all(decode, [replace(request, state=state)])) == told(run_all(make(), [request]))
    assert decode.stats().imported_tokens == state.tokens


def test_a_moved_prompt_costs_one_token_where_it_is_decoded() -> None:
    model = small_model("hybrid")
    request = ask("hybrid", {"max_new_tokens": 5})
    decode = make_engine(model, "shared")
    run_all(decode, [replace(request, state=state_of(make_engine(model, "shared"), request))])
    assert decode.stats().computed_tokens == 5


@pytest.mark.parametrize("received", [1, 4])
@pytest.mark.parametrize("sampling", [{}, {**SAMPLED, "n": 2}])
def test_a_stream_that_broke_goes_on_with_a_state_computed_anew(received: int, sampling: dict) -> None:
    model = small_model("hybrid")
    request = ask("hybrid", {"seed": 1, **sampling})
    wanted = run_all(make_engine(model, "shared"), [request])
    partials = tuple(
        PartialCompletion(index=index, token_ids=tuple(one.ids[:received])) for (_, index), one in wanted.items()
    )
    broken = replace(request, resume=Resumption(received=partials))
    state = state_of(make_engine(model, "shared"), broken)
    assert state.tokens == len(PROMPT) - 1 + (received if len(partials) == 1 else 0)
    decode = make_engine(model, "shared")
    rest = run_all(decode, [replace(broken, state=state)])
    assert {name: one.ids for name, one in rest.items()} == {name: one.ids[received:] for name, one in wanted.items()}
    assert decode.stats().imported_tokens == state.tokens * len(partials)


def test_prompts_that_begin_alike_are_computed_once_and_the_caller_is_told() -> None:
    model = small_model("hybrid")
    prefill, decode = make_engine(model, "shared"), make_engine(model, "shared")
    usages = []
    for name in ("first", "second"):
        request = ask("hybrid", {}, name)
        state = state_of(prefill, request)
        usages.append(run_all(decode, [replace(request, state=state)])[name, 0].usage)
    assert prefill.stats().cached_tokens == usages[1].cached_tokens > 0 == usages[0].cached_tokens
    assert prefill.stats().computed_tokens == 2 * (len(PROMPT) - 1) - usages[1].cached_tokens
    assert decode.stats().cached_tokens == 0


class Elsewhere(SharedCache):
    """A stranger's store, whose rows nobody else could read."""

    def create(self, specs, size):
        class Kept(SharedStore):
            def export(self, request, tokens):
                raise Incompatible(f"request {request} stays")

        return Kept(specs, size)


def damaged(state: PromptState) -> PromptState:
    return replace(state, exported=state.exported[:-1] + bytes([state.exported[-1] ^ 1]))


@pytest.mark.parametrize("what", ["damaged", "of another model", "of other tokens", "cut off", "of another length"])
def test_a_state_that_does_not_fit_is_not_used_and_the_tokens_are_right(what: str) -> None:
    model = small_model("paged")
    request = ask("paged", {})
    state = state_of(make_engine(model, "paged"), request)
    given = {
        "damaged": damaged(state),
        "of another model": replace(state_of(make_engine(small_model("window")), request), digest=state.digest),
        "of other tokens": state_of(make_engine(model, "paged"), ask("paged", {}, prompt=PROMPT[::-1])),
        "cut off": replace(state, exported=state.exported[:40]),
        "of another length": replace(state, tokens=state.tokens - 1),
    }[what]
    decode = make_engine(model, "paged")
    assert told(run_all(decode, [replace(request, state=given)])) == told(
        run_all(make_engine(model, "paged"), [request])
    )
    assert decode.stats().imported_tokens == 0
    assert decode.stats().computed_tokens == len(PROMPT) + 11
    assert_empty(decode)


def test_a_request_that_ends_before_it_is_admitted_leaves_no_state() -> None:
    model = small_model("hybrid")
    now = [0.0]
    request = ask("hybrid", {})
    state = state_of(make_engine(model, "shared"), request)
    decode = make_engine(model, "shared", clock=lambda: now[0])
    for name, deadline in (("cancelled", None), ("late", 5.0)):
        decode.submit(replace(request, id=name, state=state, deadline=deadline))
    assert decode.stats().offloaded_bytes == 2 * len(state.exported)
    decode.cancel("cancelled")
    now[0] = 6.0
    outputs = decode.step()
    assert {output.request_id for output in outputs} == {"cancelled", "late"}
    assert any(isinstance(output.error, DeadlineExceeded) for output in outputs)
    assert decode.stats().offloaded_bytes == 0
    assert_empty(decode)


def test_a_prompt_that_is_cancelled_while_it_is_computed_leaves_nothing() -> None:
    engine = make_engine(small_model("hybrid"), "paged", max_num_batched_tokens=4)
    engine.submit(ask("hybrid", {}).prefill())
    engine.step()
    engine.cancel("asked")
    (output,) = engine.step()
    assert output.state is None
    assert output.error is not None
    assert_empty(engine)


def test_crowded_engines_move_prompts_too() -> None:
    """Imported requests are preempted and come back, as others do."""
    model = small_model("window")
    requests = [ask("window", {"max_new_tokens": 30}, f"r{i}", PROMPT[i:]) for i in range(8)]
    wanted = told(run_all(make_engine(model, "paged"), requests))
    prefill, decode = make_engine(model, "paged"), make_engine(model, "paged", tokens=96)
    moved = [replace(request, state=state_of(prefill, request)) for request in requests]
    assert told(run_all(decode, moved)) == wanted
    assert decode.stats().preemptions > 0
    assert_empty(decode)


def test_what_cannot_be_moved_is_refused_by_name() -> None:
    model = small_model("paged")
    with pytest.raises(InvalidValue, match="scor"):
        replace(ask("paged", {}), params=ScoringParams()).prefill()
    with pytest.raises(InvalidValue, match="token_ids"):
        ask("paged", {}, prompt=(1,)).prefill()
    size = StoreSize(tokens=96 * 8, requests=8, dtype="float64")
    engine = Engine(model, Elsewhere().create(model.state_specs(), size), LETTERS)
    engine.submit(ask("paged", {}).prefill())
    (output,) = [output for _ in range(3) for output in engine.step()]
    assert isinstance(output.error, Incompatible)
    assert_empty(engine)

    class OnlyHere:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            if name in ("export", "restore"):
                raise AttributeError(name)
            return getattr(self._store, name)

    store = installed().caches.get("paged").create(model.state_specs(), size)
    with pytest.raises(Incompatible, match="OnlyHere"):
        Engine(model, OnlyHere(store), LETTERS, EngineConfig()).submit(ask("paged", {}).prefill())


def test_a_state_is_that_of_tokens_and_of_all_that_is_read_beside_them() -> None:
    plain = Request(id="a", token_ids=(1, 2, 3))
    rows = torch.zeros(1, 4)
    others = [
        replace(plain, token_ids=(1, 2, 4)),
        replace(plain, encoder_token_ids=(5,)),
        replace(plain, adapter=SimpleNamespace(key="5")),
        *(replace(plain, prompt_embeddings=PromptEmbeddings((1,), rows, key)) for key in ("one", "another")),
    ]
    assert plain.state_digest(3) == replace(plain, id="b", tenant="t").state_digest(3)
    assert len({request.state_digest(3) for request in (plain, *others)}) == 6
