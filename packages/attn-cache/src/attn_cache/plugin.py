"""The stores that this package offers. Imports no torch before one is created, nor a store before one is asked for."""

from __future__ import annotations

from attn_core import CacheFamily, hookimpl


@hookimpl
def attn_caches() -> list[CacheFamily]:
    """Every store of the package."""
    from attn_cache.families import Contiguous, PagedTokens, SharedTokens
    from attn_cache.quantised.families import Int4Tokens, Int8Tokens, Kivi, Kivi4

    return [Contiguous(), PagedTokens(), SharedTokens(), Int8Tokens(), Int4Tokens(), Kivi(), Kivi4()]
