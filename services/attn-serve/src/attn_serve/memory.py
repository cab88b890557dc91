"""How much memory the states of all requests get."""

from __future__ import annotations

from attn_core import LanguageModel, StoreSize, state_bytes
from attn_core.errors import InvalidValue

from attn_serve.requests import EngineSettings

DEFAULT_STATE_BYTES = 512 * 2**20
DEFAULT_SEQUENCES = 64


def store_size(model: LanguageModel, settings: EngineSettings) -> StoreSize:
    """The largest store within the memory allowed, but no larger than all sequences at full context need.

    Raises `InvalidValue` where the memory would not hold one token of one request.
    """
    sequences = settings.max_sequences or DEFAULT_SEQUENCES
    allowed = settings.state_bytes or DEFAULT_STATE_BYTES
    layers = model.state_specs().values()
    # Every request may come with the longest source.
    source = getattr(model, "source_context", 0)
    fixed = sum(state_bytes(specs, tokens=0, source=source, dtype=settings.dtype) for specs in layers)
    row = sum(state_bytes(specs, tokens=1, source=source, dtype=settings.dtype) for specs in layers) - fixed
    # Beginnings that requests share bring as many snapshots of the fixed states.
    fixed *= 2
    room = allowed - fixed * sequences
    needed = sequences * model.context
    tokens = min(needed, room // row) if row else needed
    if room < 0 or tokens < 1:
        least = fixed * sequences + row
        raise InvalidValue.of("state_bytes", allowed, f"at least {least}, for {sequences} sequences")
    return StoreSize(tokens=tokens, requests=sequences, dtype=settings.dtype, device=settings.device)
