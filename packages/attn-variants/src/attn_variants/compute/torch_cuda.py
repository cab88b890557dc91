"""PyTorch's fused attention on a GPU, each backend called directly.

These are the operators among which `torch.nn.functional.scaled_dot_product_attention` chooses. Calling them by name
runs exactly the kernel that was measured, without changing global backend flags, and raises if a device lacks it.
"""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec
from torch import Tensor
from torch.nn.functional import pad

from attn_variants.compute.pairs import nothing
from attn_variants.compute.torch_sdpa import bias_of, with_scale, with_sink
from attn_variants.scores import scale_of

ALIGNED = 16
"""The rows of a bias must be aligned to this many elements; head sizes, to half as many."""

BOTTOM_RIGHT = 2
"""PyTorch's `custom_mask_type` of a causal mask aligned to the last key."""


def flash(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] of full or causal attention, by FlashAttention 2."""
    if no_pairs(operands):
        return nothing(operands)
    if more_queries(spec, operands):
        return efficient(spec, operands)
    # This operator aligns causal masks to the last key, as attn does.
    causal = spec.mask.kind == "causal" and operands.query.shape[1] > 1
    size = operands.value.shape[-1]
    rows = (heads_first(padded(rows, ALIGNED // 2)) for rows in (operands.query, operands.key, operands.value))
    scale = scale_of(spec.score, operands.query.shape[-1])
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, causal, scale=scale)[0]  # noqa: SLF001
    return out.transpose(1, 2)[..., :size]


def cudnn(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output of full or causal attention, by cuDNN; causal calls of unequal lengths use `flash`."""
    if no_pairs(operands):
        return nothing(operands)
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    causal = spec.mask.kind == "causal" and queries > 1
    if causal and queries != keys:
        return flash(spec, operands)
    rows = tuple(heads_first(rows) for rows in (operands.query, operands.key, operands.value))
    scale, wanted = scale_of(spec.score, operands.query.shape[-1]), torch.is_grad_enabled()
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        *rows, None, wanted, 0.0, causal, scale=scale
    )[0]
    return out.transpose(1, 2)


def efficient(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output under any mask or bias given as a tensor, with or without a sink, by memory-efficient attention."""
    if no_pairs(operands):
        return nothing(operands)
    size = operands.value.shape[-1]
    operands, scale = with_scale(spec, operands)
    if is_band(spec, operands) and not more_queries(spec, operands):
        causal = spec.mask.kind == "causal" and operands.query.shape[1] > 1
        query, key, value = laid_out(operands)
        alone = {"bias": None, "dropout_p": 0.0, "compute_log_sumexp": torch.is_grad_enabled(), "scale": scale}
        lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
        out: Tensor = torch.ops.aten._efficient_attention_forward(  # noqa: SLF001
            query, key, value, custom_mask_type=BOTTOM_RIGHT if causal else 0, **alone, **lengths
        )[0]
        return out[..., :size]
    if spec.distribution.kind == "softmax":
        bias, seen = with_every_row(bias_of(spec, operands))
    else:
        # A query that sees no key gives all its weight to the sink.
        operands, bias = with_sink(operands, bias_of(spec, operands), scale)
        seen = None
    query, key, value = laid_out(operands)
    given = None if bias is None else aligned(bias, query, key)
    rows = (heads_first(part) for part in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        *rows, given, torch.is_grad_enabled(), scale=scale
    )[0].transpose(1, 2)[..., :size]
    return out if seen is None else out * seen.to(out.dtype).transpose(1, 2)


def laid_out(operands: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, token, heads, size] with as many heads as queries, padded to aligned sizes."""
    heads = operands.query.shape[2]
    query, key, value = (
        padded(of_every_head(rows, heads), ALIGNED // 2) for rows in (operands.query, operands.key, operands.value)
    )
    return query, key, value


def is_band(spec: AttentionSpec, operands: AttentionInputs) -> bool:
    """Whether the call is full or causal softmax attention without padding, modifiers or given positions."""
    explicit = operands.query_positions is not None or operands.key_positions is not None
    if explicit or operands.key_padding_mask is not None or spec.modifiers:
        return False
    return spec.mask.kind in {"full", "causal"} and spec.distribution.kind == "softmax"


def more_queries(spec: AttentionSpec, operands: AttentionInputs) -> bool:
    """Whether a causal call has more queries than keys, so that the first queries see no key."""
    # Not returned directly: while tracing, the comparison of two lengths is not a bool.
    if spec.mask.kind == "causal" and operands.query.shape[1] > operands.key.shape[1]:  # noqa: SIM103
        return True
    return False


def no_pairs(operands: AttentionInputs) -> bool:
    """Whether there is no query or no key, which PyTorch's kernels do not support."""
    if operands.key.shape[1] == 0 or operands.query.shape[1] == 0 or operands.query.shape[0] == 0:  # noqa: SIM103 -- as above
        return True
    return False


def with_every_row(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Let queries that see no key see all keys, as their weights would be 0 / 0 and their gradients NaN.

    Returns the new mask or bias, and bool [..., query, 1], False for these queries, whose outputs must be zeroed.
    """
    if bias is None:
        return None, None
    allowed = bias if bias.dtype == torch.bool else bias != -torch.inf
    seen = allowed.any(-1, keepdim=True)
    if bias.dtype == torch.bool:
        return bias | ~seen, seen
    return bias.masked_fill(~seen, 0), seen


def aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias [batch, heads, query, key] in the dtype of the queries, with its rows aligned as the kernel requires."""
    if bias.dtype == torch.bool:
        bias = query.new_zeros(bias.shape).masked_fill_(~bias, -torch.inf)
    keys = key.shape[1]
    bias = pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % ALIGNED))[..., :keys]
    return bias.expand(query.shape[0], query.shape[2], query.shape[1], keys)


def padded(rows: Tensor, base: int) -> Tensor:
    """Pad rows [..., size] with zeros to a multiple of `base`."""
    rest = -rows.shape[-1] % base
    return pad(rows, (0, rest)) if rest else rows


def of_every_head(rows: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [batch, key, key_value_heads, size] for each query head, in equal consecutive groups."""
    shared = rows.shape[2]
    return rows if shared == heads else rows.repeat_interleave(heads // shared, dim=2)


def heads_first(rows: Tensor) -> Tensor:
    """A view of rows [batch, token, heads, size] as [batch, heads, token, size]."""
    return rows.transpose(1, 2)
