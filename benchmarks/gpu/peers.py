"""The same attention with torch: SDPA with cuDNN, FlashAttention 2 or its default, and compiled FlexAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attn_core import AttentionInputs
from attn_core.masks import mask_mod
from cases import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "default": None, "flash": SDPBackend.FLASH_ATTENTION}
Attention = Callable[[AttentionInputs], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sdpa(case: Case, backend: SDPBackend | None) -> Attention:
    """torch's SDPA with this backend, or its default for None; full or causal masks with as many queries as keys."""
    causal = case.mask.kind == "causal"

    def run(operands: AttentionInputs) -> Tensor:
        query, key, value = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
        shared = case.heads[0] != case.heads[1]
        if backend is None:
            return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shared)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shared)

    return run


def flex(case: Case, device: str, written: MaskMod | None = None) -> Attention:
    """Compiled FlexAttention with the mask of the case, or with `written`; blocks are precomputed, as in attn."""
    # Each mask is compiled twice; after eight recompilations torch would silently compute all pairs.
    torch.compiler.reset()
    asked = written or mask_mod(case.mask, case.queries, case.keys)
    blocks = create_block_mask(asked, None, None, case.queries, case.keys, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    shared = case.heads[0] != case.heads[1]

    def run(operands: AttentionInputs) -> Tensor:
        query, key, value = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
        out: Tensor = compiled(query, key, value, block_mask=blocks, enable_gqa=shared)
        return out

    return run
