"""Partial attention over some of the keys, and merging of partial results (online softmax)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.masking import LOWEST, of_query_heads, wide
from torch import Tensor

from attn_variants.compute.modifiers import modify
from attn_variants.compute.plain import pairs_of
from attn_variants.scores import scores


class Partial(NamedTuple):
    """Outputs [..., size] over some keys, and `sums` [...], the logarithms of the sums of exponentials (log-sum-exp).

    If no key is allowed, the output is zero and the logarithm -inf.
    """

    out: Tensor
    sums: Tensor


def partial(spec: AttentionSpec, operands: AttentionInputs) -> Partial:
    """Softmax attention over the given keys: [batch, heads, query, value_size] and [batch, heads, query].

    Both are at least float32, and gradients flow through both.
    """
    pairs = pairs_of(spec, operands)
    found, allowed = modify(pairs, scores(pairs)), pairs.allowed
    value = of_query_heads(spec.heads, wide(operands.value).transpose(1, 2))
    if allowed is None:
        sums = found.logsumexp(-1)
        return Partial(torch.exp(found - sums[..., None]) @ value, sums)
    sums = found.masked_fill(~allowed, LOWEST).logsumexp(-1)
    weights = torch.exp((found - sums[..., None]).masked_fill(~allowed, -torch.inf))
    return Partial(weights @ value, sums.masked_fill(~allowed.any(-1), -torch.inf))


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Partial:
    """Merge two partial results over disjoint keys (Milakov and Gimelshein 2018, arXiv 1805.02867).

    The order does not matter. Gradients flow through outputs and sums, also where no key is allowed.
    """
    top = torch.maximum(one[1], other[1]).detach()
    top = top.masked_fill(top.isneginf(), 0.0)
    sums = torch.exp(one[1] - top), torch.exp(other[1] - top)
    total = sums[0] + sums[1]
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = one[0] * (sums[0] / total)[..., None] + other[0] * (sums[1] / total)[..., None]
    return Partial(out, (top + total.log()).masked_fill(empty, -torch.inf))
