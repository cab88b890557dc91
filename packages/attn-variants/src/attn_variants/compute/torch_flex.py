"""PyTorch's FlexAttention, compiled for each mask and each pair of lengths (Dong et al. 2024, arXiv 2412.05496)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Mask
from attn_core.graph_safety import device_cache
from attn_core.masks import mask_mod
from attn_core.modifiers import Alibi, SoftCap
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from attn_variants.compute.pairs import nothing
from attn_variants.compute.torch_cuda import heads_first, no_pairs
from attn_variants.scores import scale_of

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) -> score, for a single pair; FlexAttention vectorises it."""

RECOMPILED = 1024
"""The limit of recompilations; beyond torch's default, eight, FlexAttention would compute all pairs instead."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size]; the first call for a mask and lengths takes seconds to compile."""
    if no_pairs(operands):
        return nothing(operands)
    query, key, value = (heads_first(rows) for rows in (operands.query, operands.key, operands.value))
    queries, keys = query.shape[2], key.shape[2]
    with torch._dynamo.config.patch(recompile_limit=RECOMPILED, accumulated_recompile_limit=RECOMPILED):  # noqa: SLF001
        out: Tensor = compiled()(
            query,
            key,
            value,
            score_mod=score_mod(spec, queries, keys, query.device),
            block_mask=blocks_of(spec.mask, queries, keys, query.device),
            scale=scale_of(spec.score, query.shape[-1]),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2)


@cache
def compiled() -> Callable[..., Any]:
    """The compiled FlexAttention; the compiler is loaded on first use."""
    run: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return run


@device_cache(256)
def blocks_of(mask: Mask, queries: int, keys: int, device: torch.device) -> BlockMask:
    """The `BlockMask` of a mask, evaluated once for every pair and cached."""
    heads = mask.heads
    with torch.inference_mode(mode=False), torch.no_grad():
        return create_block_mask(mask_mod(mask, queries, keys), None, heads, queries, keys, device=str(device))


@device_cache(256)
def score_mod(spec: AttentionSpec, queries: int, keys: int, device: torch.device) -> ScoreMod | None:
    """The modifiers of a spec composed into one `score_mod`; None if there are none."""
    steps: list[ScoreMod] = []
    for modifier in spec.modifiers:
        if isinstance(modifier, SoftCap):
            steps.append(partial(_capped, modifier.cap))
        elif isinstance(modifier, Alibi):
            slopes = torch.tensor(modifier.slopes(spec.heads.query), dtype=torch.float32, device=device)
            steps.append(partial(_sloped, slopes, keys - queries))
    if not steps:
        return None

    def every(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        for step in steps:
            score = step(score, batch, head, query, key)
        return score

    return every


def _capped(cap: float, score: Tensor, *_: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


def _sloped(
    slopes: Tensor, offset: int, score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    return score - slopes[head] * (query + offset - key).abs()
