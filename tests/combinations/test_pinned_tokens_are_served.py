"""A window and tokens that stay, as masks say it: bounded memory, and the tokens of the whole sequences."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from attn_core import Paged, RaggedBatch, Slot, installed, state_bytes
from attn_core.errors import Incompatible
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

VOCABULARY, CONTEXT = 32, 64
FORMS: dict[str, dict[str, Any]] = {
    "sinks": {"mechanism": "attention_sinks", "options": {"sinks": 3, "window": 5}},
    "summaries": {"mechanism": "fixed", "options": {"block": 8, "summaries": 2}},
    "heads": {"mechanism": "fixed", "options": {"block": 8, "summaries": 2, "pattern": "heads"}},
    "shared": {"mechanism": "fixed", "options": {"block": 8, "summaries": 1}, "kv_sharing": "cla:2"},
}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "positions": "rotary"}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


@cache
def model(form: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_plain(SIZES | {"max_seq_len": CONTEXT} | FORMS[form])).double().eval()


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(VOCABULARY, (21,), generator=generator).tolist()
    tails = [torch.randint(VOCABULARY, (1 + 3 * n,), generator=generator).tolist() for n in range(6)]
    tasks = [SamplingParams(max_new_tokens=6 + n, ignore_eos=True) for n in range(6)]
    prompts = [(*stem, *tail) if n % 2 else tuple(tail) for n, tail in enumerate(tails)]
    return [Request(id=f"r{n}", token_ids=p, params=t) for n, (p, t) in enumerate(zip(prompts, tasks, strict=True))]


@cache
def whole(form: str) -> dict[str, list[int]]:
    """The greedy tokens of whole sequences, which keep nothing."""
    found = {}
    for request in requests():
        tokens = list(request.token_ids)
        for _ in range(request.params.max_new_tokens):
            with torch.no_grad():
                tokens.append(int(model(form)(torch.tensor([tokens]))[0, -1].argmax()))
        found[request.id] = tokens[len(request.token_ids) :]
    return found


def served(engine: Engine) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {request.id: [] for request in requests()}
    waiting = requests()
    while waiting or not engine.idle:
        if waiting:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            assert event.error is None, event.error
            made[event.request_id] += [token.id for token in event.delta.tokens]
    return made


@EVERY_FORM
@pytest.mark.parametrize("kind", ["contiguous", "paged", "shared"])
def test_a_crowd_in_chunks_gives_the_tokens_of_whole_sequences(form: str, kind: str) -> None:
    config = EngineConfig(kv_cache=kind, max_num_seqs=3, max_num_batched_tokens=9)
    room = {"contiguous": 3 * CONTEXT}.get(kind, 96)
    assert served(build_engine(model(form), config=config, kv_cache_tokens=room)) == whole(form)


@EVERY_FORM
def test_shared_prompts_and_guesses_give_the_tokens_of_whole_sequences(form: str) -> None:
    config = EngineConfig(kv_cache="shared", num_speculative_tokens=3)
    engine = build_engine(model(form), config=config, draft_model=model("sinks"))
    assert served(engine) == whole(form)
    assert engine.stats().draft_tokens > 0
    assert served(engine) == whole(form)
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize(("there", "back"), [("contiguous", "paged"), ("shared", "contiguous"), ("int8", "int8")])
def test_a_request_leaves_a_store_and_goes_on_in_another(there: str, back: str) -> None:
    decoder, tokens = model("summaries"), torch.randint(VOCABULARY, (40,))
    size = StoreSize(tokens=2 * CONTEXT, requests=2, dtype="float64")
    stores = [installed().caches.get(kind).create(decoder.state_specs(), size) for kind in (there, back, there)]

    def step(store: Any, done: int, count: int) -> torch.Tensor:
        assert store.reserve(7, done + count)
        batch = RaggedBatch.of([count], [done], torch.tensor)
        with torch.no_grad():
            return decoder.logits(decoder.step(tokens[done : done + count], batch, store.view(batch, [7])))

    for store in stores[::2]:
        assert store.admit(7)
        step(store, 0, 26)
    assert stores[1].restore(7, stores[0].export(7, 26)) == 26
    for done in range(26, 40):
        torch.testing.assert_close(step(stores[1], done, 1), step(stores[2], done, 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "shared"])
def test_4096_tokens_weigh_the_window_and_the_tokens_that_stay(kind: str) -> None:
    sizes = SIZES | {"max_seq_len": 8192, "num_layers": 1}
    for options, kept in (
        ({"mechanism": "attention_sinks", "options": {"sinks": 4, "window": 60}}, 60 + 4),
        ({"mechanism": "fixed", "options": {"block": 64, "summaries": 2}}, 64 + 8192 // 64 * 2),
        ({"mechanism": "gqa", "num_kv_heads": 4}, 4096),
    ):
        specs = Decoder(DecoderConfig.from_plain(sizes | options)).state_specs()
        store = installed().caches.get(kind).create(specs, StoreSize(tokens=4096, requests=1))
        store.admit(0)
        store.reserve(0, 4096)
        said = sum(state_bytes(states, tokens=4096, dtype="float32") for states in specs.values())
        assert said == store.live_bytes(0, 4096) == kept * 2 * 32 * 4


def test_a_context_that_is_no_longer_than_what_is_kept_pins_nothing() -> None:
    sizes = SIZES | {"num_layers": 1} | FORMS["sinks"]
    kinds = {
        context: {
            name: (type(spec), getattr(spec, "window", None))
            for specs in Decoder(DecoderConfig.from_plain(sizes | {"max_seq_len": context})).state_specs().values()
            for name, spec in specs.items()
        }
        for context in (8, 9)
    }
    assert kinds == {8: {"kv": (Paged, None)}, 9: {"kv": (Paged, 5), "pinned": (Slot, None)}}


def test_layers_share_keys_and_values_only_where_the_same_tokens_stay() -> None:
    def built(*layers: Any) -> Decoder:
        sizes = SIZES | {"max_seq_len": CONTEXT, "kv_sharing": "cla:2", "pattern": list(layers)}
        return Decoder(DecoderConfig.from_plain(sizes))

    eight, four = ({"mechanism": "fixed", "options": {"block": n, "summaries": 1}} for n in (8, 4))
    shifted = {"mechanism": "fixed", "options": {"block": 8, "summaries": 2}}
    everything, near = "mha", {"mechanism": "sliding_window", "options": {"window": 3}}
    for pair in ((eight, eight), (everything, eight), (eight, near)):
        built(*pair)
    for pair, said in (((eight, four), "keeps other tokens"), ((eight, shifted), "keeps other tokens")):
        with pytest.raises(Incompatible, match=said):
            built(*pair)
    with pytest.raises(Incompatible, match=r"differ in shape|keeps 8 tokens"):
        built(eight, everything)
