"""How much memory the states of all requests get."""

from __future__ import annotations

from bisect import bisect_right

from attn_core import CacheFamily
from attn_core.errors import InvalidValue
from attn_core.models import LanguageModel
from attn_core.stores import StoreSize

from attn_serve.requests import EngineSettings

DEFAULT_STATE_BYTES = 512 * 2**20
DEFAULT_SEQUENCES = 64


def store_size(model: LanguageModel, family: CacheFamily, settings: EngineSettings) -> StoreSize:
    """The largest store within the memory allowed, by the family's own formula, but no larger than all sequences at
    full context need.

    Raises `InvalidValue` where the memory would not hold one token of one request.
    """
    sequences = settings.max_sequences or DEFAULT_SEQUENCES
    allowed = settings.state_bytes or DEFAULT_STATE_BYTES
    specs = model.state_specs()
    # Every request may come with the longest source.
    longest = getattr(model, "source_context", 0)
    empty, full = (family.bytes(specs, tokens=0, source=source, dtype=settings.dtype) for source in (0, longest))

    def sized(tokens: int) -> StoreSize:
        return StoreSize(tokens=tokens, requests=sequences, dtype=settings.dtype, device=settings.device)

    def room(tokens: int) -> int:
        return family.room(specs, sized(tokens)) + sequences * (full - empty)

    tokens = bisect_right(range(1, sequences * model.context + 1), allowed, key=room)
    if tokens < 1:
        least = room(1)
        raise InvalidValue.of("state_bytes", allowed, f"at least {least}, for {sequences} sequences")
    return sized(tokens)
