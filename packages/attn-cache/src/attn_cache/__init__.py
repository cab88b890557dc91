"""What is remembered between decoding steps: contiguous, paged, fixed and source states."""

from attn_cache.plugin import Contiguous, PagedTokens

__all__ = ["Contiguous", "PagedTokens"]
