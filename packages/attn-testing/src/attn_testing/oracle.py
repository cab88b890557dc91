"""Attention of a spec from its definition, for kernels to be compared with. Slow, and evidently right in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from attn_core import Alibi, AttentionSpec, Heads, Modifier, Operands, ScaledDot, ScoreFunction, SoftCap
from torch import Tensor

SCORES = ("scaled_dot", "general", "additive")
MODIFIERS = ("alibi", "soft_cap", "function")
DISTRIBUTIONS = ("softmax", "sparsemax")


def attend(spec: AttentionSpec, operands: Operands) -> Tensor:
    """The output [batch, query, heads, value_size], computed in the type of the operands."""
    groups = list(spec.heads.group_of)
    key, value = operands.key[:, :, groups], operands.value[:, :, groups]
    query_places, key_places = places(operands)
    energies = scores(spec, operands.query, key, operands.parameters)
    for modifier in spec.modifiers:
        energies = modified(
            modifier, spec.heads, energies, query_places[:, None, :, None], key_places[:, None, None, :]
        )
    allowed = allowed_pairs(spec, operands)
    share = {"softmax": softmax, "sparsemax": sparsemax}[spec.distribution.kind]
    return torch.einsum("bhqk,bkhd->bqhd", share(energies, allowed.expand(energies.shape)), value)


def places(operands: Operands) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, [batch or 1, length] each."""
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    query, key = operands.query_positions, operands.key_positions
    own = torch.arange(keys, device=operands.query.device)[None]
    return own[:, keys - queries :] if query is None else query, own if key is None else key


def allowed_pairs(spec: AttentionSpec, operands: Operands) -> Tensor:
    """Which pairs may meet, bool [batch, heads, query, key], sequence by sequence and head by head."""
    batch, keys = operands.key.shape[:2]
    query_places, key_places = (rows.expand(batch, -1) for rows in places(operands))
    found = []
    for row in range(batch):
        real = torch.ones(keys, dtype=torch.bool) if operands.keep is None else operands.keep[row].cpu()
        ends = (key_places[row].cpu() + 1)[real]
        mask = spec.mask.over(int(ends.max()) if len(ends) else 0)
        query, key = query_places[row, :, None].cpu(), key_places[row, None, :].cpu()
        seen = [torch.as_tensor(mask.of_head(head).allows(query, key)) & real for head in range(spec.heads.query)]
        found.append(torch.stack(seen))
    return torch.stack(found).to(operands.query.device)


def scores(spec: AttentionSpec, query: Tensor, key: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Scores [batch, heads, query, key] of queries and keys [batch, length, heads, key_size]."""
    if isinstance(spec.score, ScaledDot):
        scale = 1 / math.sqrt(query.shape[-1]) if spec.score.scale is None else spec.score.scale
        return scale * torch.einsum("bqhd,bkhd->bhqk", query, key)
    if spec.score.kind == "general":
        return torch.einsum("bqhd,hde,bkhe->bhqk", query, weights["weight"], key)
    of_query = torch.einsum("bqhd,hdu->bhqu", query, weights["query_weight"])
    of_key = torch.einsum("bkhd,hdu->bhku", key, weights["key_weight"][list(spec.heads.group_of)])
    hidden = of_query[:, :, :, None] + of_key[:, :, None] + weights["bias"][:, None, None]
    return torch.einsum("bhqku,hu->bhqk", torch.tanh(hidden), weights["vector"])


def modified(modifier: Modifier, heads: Heads, energies: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Scores [batch, heads, query, key] after one modifier; positions broadcast with them."""
    if isinstance(modifier, Alibi):
        slopes = torch.tensor(alibi_slopes(heads.query), dtype=energies.dtype, device=energies.device)
        return energies - slopes[:, None, None] * (query - key).abs()
    if isinstance(modifier, SoftCap):
        return modifier.cap * torch.tanh(energies / modifier.cap)
    if isinstance(modifier, ScoreFunction):
        head = torch.arange(heads.query, device=energies.device)[:, None, None]
        changed: Tensor = modifier.function(energies, head, query, key)
        return changed.to(energies.dtype)
    raise NotImplementedError(f"the oracle does not know the modifier {modifier.kind!r}")


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/H); for other H those of the power of two below, then every other one of the next (Press et al. 2022)."""
    lower = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return first + [2 ** (-8 * h / (2 * lower)) for h in range(1, 2 * lower, 2)][: heads - lower]


def softmax(energies: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys, zeros where there is none."""
    some = allowed.any(-1, keepdim=True)
    return torch.softmax(energies.masked_fill(~allowed & some, -math.inf), -1) * some


def sparsemax(energies: Tensor, allowed: Tensor) -> Tensor:
    """The point of the simplex nearest to the scores: its threshold found by bisection (Martins and Astudillo 2016)."""
    some = allowed.any(-1, keepdim=True)
    lowest = max(-1e6, torch.finfo(energies.dtype).min / 2)  # float16 ends at 65504
    energies = energies.masked_fill(~allowed & some, lowest)
    high = energies.detach().amax(-1, keepdim=True)
    low = high - 1
    for _ in range(60):
        middle = (low + high) / 2
        more = (energies.detach() - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    support = energies.detach() > high
    # Given its support the threshold is a sum, which has the gradient of the whole.
    threshold = (torch.where(support, energies, 0.0).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return (energies - threshold).clamp(min=0) * some
