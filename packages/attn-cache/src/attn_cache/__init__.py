"""What is remembered between decoding steps: contiguous, paged, shared, fixed and source states."""

from attn_cache.plugin import Contiguous, PagedTokens, SharedTokens

__all__ = ["Contiguous", "PagedTokens", "SharedTokens"]
