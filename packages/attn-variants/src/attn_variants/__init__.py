"""Attention mechanisms for PyTorch.

- `layer("gqa", hidden_size=512, num_heads=8, num_kv_heads=2)`: builds the `torch.nn.Module` of any installed mechanism.
- `attend(query, key, value, attn_mask=..., score=..., distribution=...)`: computes attention over projected
  tensors, like `torch.nn.functional.scaled_dot_product_attention`, with any mask, score, modifier and distribution of
  `attn_core`.
- `MultiheadAttention(embed_dim, num_heads, mechanism="mha")`: a replacement for `torch.nn.MultiheadAttention`.
- `replace(model, "sparsemax")`: exchanges the `torch.nn.MultiheadAttention` modules of a model, with their weights.

These names are loaded on first use: importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names

if TYPE_CHECKING:
    from attn_variants.functional import attend
    from attn_variants.layers import layer
    from attn_variants.multihead_attention import MultiheadAttention
    from attn_variants.replacement import replace

__all__ = ["MultiheadAttention", "attend", "layer", "replace"]

lazy_names(
    __name__,
    {
        "multihead_attention": ("MultiheadAttention",),
        "functional": ("attend",),
        "layers": ("layer",),
        "replacement": ("replace",),
    },
)
