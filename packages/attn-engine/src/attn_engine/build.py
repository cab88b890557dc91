"""An engine from a model and the name of a cache."""

from __future__ import annotations

from attn_core import installed
from attn_core.models import LanguageModel, Tokenizer
from attn_core.stores import StateStore, StoreSize

from attn_engine.draft import Draft
from attn_engine.engine import Engine
from attn_engine.limits import EngineLimits


def build_engine(
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    *,
    cache: str = "contiguous",
    requests: int = 16,
    tokens: int | None = None,
    limits: EngineLimits = EngineLimits(),  # noqa: B008  (frozen)
    draft: LanguageModel | None = None,
) -> Engine:
    """An engine with a new store of the installed cache family called `cache`.

    At most `requests` run at a time; `tokens` is what they remember together, by default the model's context each.
    A `draft`, a smaller decoder of the same vocabulary, guesses `limits.guesses` tokens ahead.
    States have the element type and device of the model's weights. Raises `UnknownName` for the cache.
    """
    store = _store(model, cache, requests, tokens)
    if draft is None:
        return Engine(model, store, tokenizer, limits)
    helper = Draft(draft, _store(draft, cache, requests, None), limits.step_tokens)
    return Engine(model, store, tokenizer, limits, draft=helper)


def _store(model: LanguageModel, cache: str, requests: int, tokens: int | None) -> StateStore:
    weights = next(model.parameters())  # type: ignore[attr-defined]
    size = StoreSize(
        tokens=requests * model.context if tokens is None else tokens,
        requests=requests,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=str(weights.device),
    )
    return installed().caches.get(cache).create(model.state_specs(), size)
