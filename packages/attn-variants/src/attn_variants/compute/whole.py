"""Attention with dropout by the training kernels for whole sequences."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.kernels.base import needs_operations
from attn_core.kernels.product import WholeAttentionKernel, whole_attention_kernel
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attn_variants.compute import plain
from attn_variants.scores import scale_of

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Tensor classes whose data are plain memory, which excludes tensor subclasses."""


def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] of causal or full softmax attention.

    By the plain computation if no kernel supports the call."""
    query, key, value = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
    causal = spec.mask.kind == "causal"
    kernel = kernel_of(query, key, value, causal=causal)
    if kernel is None:
        return plain.attend(spec, operands)
    scale = scale_of(spec.score, query.shape[-1])
    out = kernel.attention(query, key, value, causal=causal, scale=scale, dropout=operands.dropout)
    return out.transpose(1, 2)


def kernel_of(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> WholeAttentionKernel | None:
    """The kernel for a call with dropout, or None if none supports it.

    None also in dispatch modes, such as FLOP counters, and in torch.func transforms: both need torch operations."""
    if needs_operations(_get_current_dispatch_mode()) or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return None
    if any(type(rows) not in PLAIN_TENSORS for rows in (query, key, value)):
        return None
    return whole_attention_kernel(query, key, value, causal=causal, dropout=True)
