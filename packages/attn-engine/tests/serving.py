"""Runs requests through engines of the small models."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from attn_core import installed
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineLimits, Event, Finish, Request, Sampling
from small_models import LETTERS, VOCABULARY, SmallModel


@dataclass
class Outcome:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list = field(default_factory=list)
    finish: Finish | None = None

    def take(self, event: Event) -> None:
        assert self.finish is None, "news after the end"
        self.tokens += event.tokens
        self.ids += [token.id for token in event.tokens]
        self.text += event.text
        self.finish = event.finish


def make_engine(
    model, cache="contiguous", *, tokens=96 * 8, requests=8, step_tokens=256, waiting=1024, branches=1, **options
):
    size = StoreSize(tokens=tokens, requests=requests, dtype="float64")
    store = installed().caches.get(cache).create(model.state_specs(), size)
    limits = EngineLimits(step_tokens=step_tokens, waiting=waiting, branches=branches)
    return Engine(model, store, options.pop("tokenizer", LETTERS), limits, **options)


def run(engine: Engine, requests: list[Request], *, every: int = 0) -> dict[str, Outcome]:
    """All outcomes; with `every`, a request joins only each so many steps."""
    return {name: outcome for (name, choice), outcome in run_all(engine, requests, every=every).items() if choice == 0}


def run_all(engine: Engine, requests: list[Request], *, every: int = 0) -> dict[tuple[str, int], Outcome]:
    """The outcome of every completion, by its request and choice."""
    outcomes = {(request.id, choice): Outcome() for request in requests for choice in range(request.completions)}
    ended: set[str] = set()
    queue = list(requests)
    for _ in range(5000):
        if every == 0:
            while queue:
                engine.submit(queue.pop(0))
        for event in engine.step():
            assert event.request not in ended, "news after the last"
            outcomes[event.request, event.choice].take(event)
            if event.last:
                ended.add(event.request)
        if every and queue and _ % every == 0:
            engine.submit(queue.pop(0))
        if not queue and engine.idle:
            assert ended == {request.id for request in requests}
            return outcomes
    raise AssertionError("the engine never came to an end")


def some_requests(model: SmallModel, count: int = 8, seed: int = 0, **sampling) -> list[Request]:
    rng = random.Random(seed)
    needs_source = any("source" in specs for specs in model.state_specs().values())
    sampling.setdefault("ignore_end", True)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most)))

    return [
        Request(
            id=f"r{i}",
            token_ids=ids(1, 30),
            task=Sampling(max_new_tokens=rng.randint(1, 25), **sampling),
            source_ids=ids(1, 9) if needs_source else None,
        )
        for i in range(count)
    ]


def assert_empty(engine: Engine) -> None:
    usage = engine._store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)
    assert engine.load().running == engine.load().waiting == 0
