"""Runs requests through engines of the small models."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from attn_core import installed
from attn_core.errors import AttnError
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams
from attn_schema import Usage
from small_models import LETTERS, VOCABULARY, SmallModel


@dataclass
class Outcome:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list = field(default_factory=list)
    ended: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    score: float | None = None
    usage: Usage | None = None
    error: AttnError | None = None

    def take(self, output: RequestOutput) -> None:
        delta = output.delta
        assert not self.ended, "an output after the end"
        self.tokens += delta.tokens
        self.ids += [token.id for token in delta.tokens]
        self.text += delta.text
        self.ended, self.error, self.usage = output.ended, output.error, delta.usage
        self.finish_reason, self.stop_reason, self.score = delta.finish_reason, delta.stop_reason, delta.score


def make_engine(
    model, cache="contiguous", *, tokens=96 * 8, requests=8, clock=None, draft_model=None, tokenizer=LETTERS, **config
):
    size = StoreSize(tokens=tokens, requests=requests, dtype="float64")
    store = installed().caches.get(cache).create(model.state_specs(), size)
    options = {"draft_model": draft_model} | ({"clock": clock} if clock else {})
    return Engine(model, store, tokenizer, EngineConfig(**config), **options)


def run(engine: Engine, requests: list[Request], *, every: int = 0) -> dict[str, Outcome]:
    """All outcomes; with `every`, a request joins only each so many steps."""
    return {name: outcome for (name, choice), outcome in run_all(engine, requests, every=every).items() if choice == 0}


def run_all(engine: Engine, requests: list[Request], *, every: int = 0) -> dict[tuple[str, int], Outcome]:
    """The outcome of every completion, by its request and choice."""
    outcomes = {(request.id, choice): Outcome() for request in requests for choice in range(request.n)}
    ended: set[str] = set()
    queue = list(requests)
    for _ in range(5000):
        if every == 0:
            while queue:
                engine.submit(queue.pop(0))
        for event in engine.step():
            assert event.request_id not in ended, "an output after the last"
            outcomes[event.request_id, event.delta.index].take(event)
            if event.last:
                ended.add(event.request_id)
        if every and queue and _ % every == 0:
            engine.submit(queue.pop(0))
        if not queue and engine.idle:
            assert ended == {request.id for request in requests}
            return outcomes
    raise AssertionError("the engine never came to an end")


def some_requests(model: SmallModel, count: int = 8, seed: int = 0, **sampling) -> list[Request]:
    rng = random.Random(seed)
    needs_source = any("source" in specs for specs in model.state_specs().values())
    sampling.setdefault("ignore_eos", True)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most)))

    return [
        Request(
            id=f"r{i}",
            token_ids=ids(1, 30),
            params=SamplingParams(max_new_tokens=rng.randint(1, 25), **sampling),
            encoder_token_ids=ids(1, 9) if needs_source else None,
        )
        for i in range(count)
    ]


def assert_empty(engine: Engine) -> None:
    usage = engine._store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)
    assert engine.stats().running == engine.stats().waiting == 0
