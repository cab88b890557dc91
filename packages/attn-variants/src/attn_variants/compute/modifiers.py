"""Score modifiers, applied between the score function and the distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core.errors import InvalidValue
from attn_core.modifiers import Alibi, BiasTable, Modifier, RelativeKeys, RelativeValues, ScoreFunction, SoftCap
from torch import Tensor

from attn_variants.compute.pairs import Pairs
from attn_variants.compute.relative import relative_bias, relative_keys
from attn_variants.tensor_masks import TensorBias


def modify(pairs: Pairs, scores: Tensor) -> Tensor:
    """Scores [batch, heads, query, key] after every modifier, in order."""
    for modifier in pairs.spec.modifiers:
        scores = modified(pairs, modifier, scores)
    return scores


def modified(pairs: Pairs, modifier: Modifier, scores: Tensor) -> Tensor:
    """Scores [batch, heads, query, key] after one modifier."""
    if isinstance(modifier, RelativeValues):
        return scores
    if isinstance(modifier, SoftCap):
        return modifier.cap * torch.tanh(scores / modifier.cap)
    if isinstance(modifier, ScoreFunction):
        head = torch.arange(pairs.spec.heads.query, device=scores.device)[None, :, None, None]
        changed: Tensor = modifier.function(scores, head, *pairs.places, **pairs.weights("modifiers.function"))
        return changed
    return scores + bias(pairs, modifier, scores.dtype)


def bias(pairs: Pairs, modifier: Modifier, dtype: torch.dtype) -> Tensor:
    """The bias that a modifier adds to the scores, broadcastable to [batch, heads, query, key]."""
    if isinstance(modifier, Alibi):
        return alibi_bias(modifier.slopes(pairs.spec.heads.query), *pairs.places, dtype)
    if isinstance(modifier, BiasTable):
        return relative_bias(modifier, pairs.weights(f"modifiers.{modifier.kind}")["table"], *pairs.places)
    if isinstance(modifier, RelativeKeys):
        return relative_keys(pairs, modifier)
    if isinstance(modifier, TensorBias):
        return added(modifier)
    tables = "t5_bias, relative_bias, relative_keys, relative_values, dependency_keys, dependency_values"
    raise InvalidValue.of("modifier", modifier.kind, f"alibi, soft_cap, function, tensor_bias, {tables}")


def added(modifier: TensorBias) -> Tensor:
    """The tensor of a `TensorBias`; raises `InvalidValue` for the placeholder, which has none."""
    if modifier.tensor is None:
        raise InvalidValue.of("modifier", "tensor_bias without a tensor", "one with a tensor")
    return modifier.tensor


def alibi_bias(slopes: Sequence[float], query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """-m_h |i - j|, [batch or 1, heads, query, key], for the slopes m_h [heads] (Press et al. 2022).

    `query` [batch or 1, 1, query, 1] and `key` [batch or 1, 1, 1, key] are absolute positions.
    """
    falls = torch.tensor(slopes, dtype=dtype, device=query.device)
    return -falls[:, None, None] * (query - key).abs()
