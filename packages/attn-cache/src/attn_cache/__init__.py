"""What is remembered between decoding steps: contiguous, paged, shared, quantised, fixed and source states."""

from attn_cache.families import Contiguous, PagedTokens, SharedTokens
from attn_cache.quantised.blocks import BlockLayout
from attn_cache.quantised.families import Int4Tokens, Int8Tokens, Kivi, Kivi4

__all__ = ["BlockLayout", "Contiguous", "Int4Tokens", "Int8Tokens", "Kivi", "Kivi4", "PagedTokens", "SharedTokens"]
