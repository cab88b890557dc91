"""KV caches and other decoding state of running requests: contiguous, paged, prefix-sharing and quantized stores."""

from attn_cache.plugin import (
    ContiguousCache,
    Float16Cache,
    Int4Cache,
    Int8Cache,
    Kivi4Cache,
    KiviCache,
    PagedCache,
    SharedCache,
)
from attn_cache.quantization import KiviLayout

__all__ = [
    "ContiguousCache",
    "Float16Cache",
    "Int4Cache",
    "Int8Cache",
    "Kivi4Cache",
    "KiviCache",
    "KiviLayout",
    "PagedCache",
    "SharedCache",
]
