"""A request that moves to another store on its way goes on with the tokens it would have had."""

from __future__ import annotations

import pytest
import torch
from attn_cache import ContiguousCache, Int8Cache, PagedCache, SharedCache
from attn_core import RaggedBatch
from attn_core.stores import StoreSize
from small_models import KINDS, VOCABULARY, SmallModel, small_model

SIZE = StoreSize(tokens=96 * 3, requests=3, dtype="float64")
PROMPT = tuple(range(3, 60, 3))
NEW = 24


@torch.inference_mode()
def step(model: SmallModel, store, name: int, tokens: tuple[int, ...], context: int) -> int:
    """The most probable token after these."""
    store.reserve(name, context + len(tokens))
    batch = RaggedBatch.of([len(tokens)], [context], lambda values: torch.tensor(values, dtype=torch.int64))
    hidden = model.step(torch.tensor(tokens), batch, store.view(batch, [name]))
    return int(model.logits(hidden[-1]).argmax())


@torch.inference_mode()
def begin(model: SmallModel, store, name: int, source: tuple[int, ...] = (5, 1, 4)) -> None:
    store.admit(name)
    encoded = model.encode(torch.tensor(source))
    if encoded:
        store.write_source(name, encoded)


def generate(model: SmallModel, stores, moves: int) -> list[int]:
    """`NEW` tokens; after every `moves` of them the request goes to the next store, where it has another name."""
    name, tokens = 0, [*PROMPT]
    begin(model, stores[0], name)
    tokens.append(step(model, stores[0], name, PROMPT, 0))
    while len(tokens) < len(PROMPT) + NEW:
        at = (len(tokens) - len(PROMPT)) // moves
        if at > name:
            here, there = stores[name % len(stores)], stores[at % len(stores)]
            exported = here.export(name, len(tokens) - 1)
            here.release(name)
            assert there.restore(at, exported) == len(tokens) - 1
            name = at
        tokens.append(step(model, stores[name % len(stores)], name, (tokens[-1],), len(tokens) - 1))
    stores[name % len(stores)].release(name)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moves", [1, 5])
def test_a_request_that_moves_between_stores_of_every_kind_keeps_its_tokens(kind, moves):
    model = small_model(kind)
    stores = [family.create(model.state_specs(), SIZE) for family in (PagedCache(), ContiguousCache(), SharedCache())]
    for i, store in enumerate(stores):
        begin(model, store, 1000, source=(7,))
        step(model, store, 1000, tuple(range(VOCABULARY))[: 4 + 9 * i], 0)
    assert generate(model, stores, moves) == generate(model, stores[:1], NEW + 1)
    for store in stores:
        store.release(1000)
        assert (store.usage().tokens, store.usage().requests) == (0, 0)


@pytest.mark.parametrize("kind", ["paged", "hybrid"])
def test_a_request_whose_rows_are_codes_keeps_its_tokens_too(kind):
    model = small_model(kind)
    stores = [Int8Cache().create(model.state_specs(), SIZE) for _ in range(2)]
    assert generate(model, stores, 3) == generate(model, stores[:1], NEW + 1)
