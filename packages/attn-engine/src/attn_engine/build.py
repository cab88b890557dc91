"""An engine from a model and the name of a cache."""

from __future__ import annotations

from attn_core import LanguageModel, StoreSize, Tokenizer, installed

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
) -> Engine:
    """An engine with a new store of the installed cache family called `cache`.

    At most `requests` run at a time; `tokens` is what they remember together, by default the model's context each.
    States have the element type and device of the model's weights. Raises `UnknownName` for the cache.
    """
    weights = next(model.parameters())  # type: ignore[attr-defined]
    size = StoreSize(
        tokens=requests * model.context if tokens is None else tokens,
        requests=requests,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=str(weights.device),
    )
    store = installed().caches.get(cache).create(model.state_specs(), size)
    return Engine(model, store, tokenizer, limits)
