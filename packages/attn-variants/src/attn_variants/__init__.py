"""Attention mechanisms for PyTorch.

- `layer("gqa", hidden_size=512, num_heads=8, num_kv_heads=2)`: builds the `torch.nn.Module` of any installed mechanism.
- `attend(query, key, value, mask=..., score=..., distribution=...)`: computes attention over projected tensors, like
  `torch.nn.functional.scaled_dot_product_attention`, with any mask, score, modifier and distribution of `attn_core`.
- `MultiheadAttention(embed_dim, num_heads, mechanism="mha")`: a replacement for `torch.nn.MultiheadAttention`.

These names are loaded on first use: importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_variants.functional import attend
    from attn_variants.layers import layer
    from attn_variants.multihead_attention import MultiheadAttention

__all__ = ["MultiheadAttention", "attend", "layer"]

MODULES = {
    "MultiheadAttention": "attn_variants.multihead_attention",
    "attend": "attn_variants.functional",
    "layer": "attn_variants.layers",
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
