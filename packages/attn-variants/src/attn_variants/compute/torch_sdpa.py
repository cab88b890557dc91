"""PyTorch's `scaled_dot_product_attention`, called so that the conventions of attn hold."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.kernels.base import batch_invariant
from attn_core.masking import positions
from attn_core.modifiers import Alibi, BiasTable
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attn_variants.compute.modifiers import added, alibi_bias
from attn_variants.compute.pairs import allowed_pairs, nothing
from attn_variants.compute.relative import relative_bias
from attn_variants.scores import scale_of
from attn_variants.tensor_masks import TensorBias


def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] in the dtype of the values."""
    if operands.key.shape[1] == 0:
        return nothing(operands)
    causal = is_plainly_causal(spec, operands)
    bias = None if causal else bias_of(spec, operands)
    operands, scale = with_scale(spec, operands)
    if spec.distribution.kind != "softmax":
        size = operands.value.shape[-1]
        operands, bias = with_sink(operands, bias, scale)
        return fused(spec, operands, bias, scale, causal=False)[..., :size]
    return fused(spec, operands, bias, scale, causal=causal)


def with_scale(spec: AttentionSpec, operands: AttentionInputs) -> tuple[AttentionInputs, float]:
    """The inputs and their scale, never 0, by which a sink's logit could not be divided: queries become 0 instead."""
    scale = scale_of(spec.score, operands.query.shape[-1])
    return (operands, scale) if scale else (dataclasses.replace(operands, query=operands.query * 0.0), 1.0)


def _zeros_are_faster(value: Tensor) -> bool:
    """Whether values of another size than keys had better be filled up: on a CPU torch then holds all scores, which
    takes three times as long, if the kernel that does not may run."""
    if value.device.type != "cpu" or torch.is_grad_enabled() or batch_invariant():
        return False
    # Graphs cannot ask.
    return torch.compiler.is_compiling() or bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def fused(spec: AttentionSpec, operands: AttentionInputs, bias: Tensor | None, scale: float, *, causal: bool) -> Tensor:
    """The output [batch, query, heads, value_size] of softmax attention; `bias` is PyTorch's `attn_mask`."""
    query, key, value = operands.query.transpose(1, 2), operands.key.transpose(1, 2), operands.value.transpose(1, 2)
    if operands.query.shape[1] == 1:
        return one_query((operands.query, key, value), bias, scale)
    shared, size = spec.heads.key_value != spec.heads.query, value.shape[-1]
    if size != key.shape[-1] and _zeros_are_faster(value):
        widest = max(size, key.shape[-1])
        query, key, value = (pad(part, (0, widest - part.shape[-1])) for part in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=shared
    )
    return out[..., :size].transpose(1, 2)


def with_sink(operands: AttentionInputs, bias: Tensor | None, scale: float) -> tuple[AttentionInputs, Tensor | None]:
    """Prepend a key whose score is the sink's logit and whose value is zero; returns the new inputs and bias.

    Queries get further elements that hold the logit (`carried`); the sink's key is one there and zero elsewhere, other
    keys are zero there. So a sink per query head needs no bias per head, and heads still share keys.
    """
    extra = carried(operands, scale)
    count = extra.shape[-1]
    query = torch.cat([operands.query, extra.expand(*operands.query.shape[:-1], count)], dim=-1)
    sink = pad(operands.key.new_zeros(operands.key[:, :1].shape), (0, count), value=1.0)
    key = torch.cat([sink, pad(operands.key, (0, count))], dim=1)
    # Values are padded like keys, as torch's fused kernels need both to have the same size.
    value = pad(operands.value, (0, count, 0, 0, 1, 0))
    if bias is not None:
        bias = pad(bias.expand(*bias.shape[:-1], operands.key.shape[1]), (1, 0), value=bias.dtype == torch.bool)
    return dataclasses.replace(operands, query=query, key=key, value=value), bias


def carried(operands: AttentionInputs, scale: float) -> Tensor:
    """The logits of the sinks divided by the scale, as sums of elements [heads, 1 or 2] in the dtype of the queries.

    A 16-bit type needs two elements for a logit's precision. A logit of -inf is replaced by a finite one, which has the
    same weight, as its products with the zeros of other keys would be NaN.
    """
    logit, like = operands.parameters.get("distribution.logit"), operands.query
    if logit is None:
        return like.new_zeros(like.shape[2], 1)
    exact = logit.to(torch.promote_types(like.dtype, torch.float32))
    exact = exact.clamp(min=torch.finfo(like.dtype).min / 2 * min(1.0, abs(scale))) / scale
    if like.dtype.itemsize >= 4:
        return exact[:, None]
    # Only the rest carries a gradient: the logit is the sum of both.
    rounded = exact.detach().to(like.dtype)
    return torch.stack([rounded, (exact - rounded).to(like.dtype)], dim=-1)


def one_query(tensors: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, scale: float) -> Tensor:
    """Attention of one query per sequence, with the heads of a group as rows, so that keys are read once per group.

    `tensors` are queries [batch, 1, heads, size], keys and values [batch, key_value_heads, key, size].
    """
    query, key, value = tensors
    batch, _, heads, size = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups, size)
    if bias is not None and bias.shape[1] != 1:
        bias = bias.reshape(bias.shape[0], groups, heads // groups, key.shape[2])
    if heads == groups and query.dtype == torch.bfloat16:
        # torch's CPU kernel multiplies a single bfloat16 row without its matrix unit; two rows are 1.5 times faster.
        rows = rows.expand(batch, groups, 2, size)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale)
    return out[:, :, : heads // groups].reshape(batch, 1, heads, value.shape[-1])


def is_plainly_causal(spec: AttentionSpec, operands: AttentionInputs) -> bool:
    """Whether `is_causal` of PyTorch, which aligns to the first key, is equivalent to the spec for this call."""
    explicit = operands.query_positions is not None or operands.key_positions is not None
    if spec.mask.kind != "causal" or spec.modifiers or explicit or operands.key_padding_mask is not None:
        return False
    # Not returned directly: while tracing, the comparison of two lengths is not a bool, as torch's flag must be.
    if operands.query.shape[1] != operands.key.shape[1] or spec.distribution.kind != "softmax":  # noqa: SIM103
        return False
    return True


def bias_of(spec: AttentionSpec, operands: AttentionInputs) -> Tensor | None:
    """The `attn_mask` for PyTorch: None, a bool tensor, True for keys to keep, or biases; see `modifier_bias`."""
    if plainly_last(spec, operands):
        return None
    allowed = allowed_pairs(spec, operands)
    if not spec.modifiers:
        return allowed
    bias = modifier_bias(spec, operands)
    return bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))


def modifier_bias(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The sum of the modifiers' biases, [batch or 1, heads, query, key].

    On a CPU it is at least float32, which torch's kernels add before they round; other devices require the dtype of the
    queries, to which only the sum is rounded.
    """
    query, key = positions(operands)
    places = query[:, None, :, None], key[:, None, None, :]
    dtype = torch.promote_types(operands.query.dtype, torch.float32)
    bias = torch.zeros((), dtype=dtype, device=operands.query.device)
    for modifier in spec.modifiers:
        if isinstance(modifier, BiasTable):
            table = operands.parameters[f"modifiers.{modifier.kind}.table"]
            # Each entry of the table is used many times: its gradient is a long sum, taken in at least float32.
            exact = table.float() if table.dtype.itemsize < 4 else table
            bias = bias + relative_bias(modifier, exact, *places).to(dtype)
        elif isinstance(modifier, TensorBias):
            bias = bias + added(modifier).to(dtype)
        elif isinstance(modifier, Alibi):
            bias = bias + alibi_bias(modifier.slopes(spec.heads.query), *places, dtype)
    return bias if operands.query.device.type == "cpu" else bias.to(operands.query.dtype)


def plainly_last(spec: AttentionSpec, operands: AttentionInputs) -> bool:
    """Whether the call is a single causal query at the last position, which sees all keys."""
    explicit = operands.query_positions is not None or operands.key_positions is not None
    single = spec.mask.kind == "causal" and operands.query.shape[1] == 1
    return single and not explicit and operands.key_padding_mask is None and not spec.modifiers
