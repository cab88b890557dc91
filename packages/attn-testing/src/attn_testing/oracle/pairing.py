"""The positions of queries and keys, the allowed pairs, and the parameters of a part of the spec."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import AttentionInputs, AttentionSpec
from torch import Tensor


def places(operands: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys, [batch or 1, length] each."""
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    query, key = operands.query_positions, operands.key_positions
    own = torch.arange(keys, device=operands.query.device)[None]
    return own[:, keys - queries :] if query is None else query, own if key is None else key


def allowed_pairs(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """Which pairs are allowed, bool [batch, heads, query, key], computed sequence by sequence and head by head."""
    batch, keys = operands.key.shape[:2]
    query_places, key_places = (rows.expand(batch, -1) for rows in places(operands))
    found = []
    for row in range(batch):
        real = (
            torch.ones(keys, dtype=torch.bool)
            if operands.key_padding_mask is None
            else operands.key_padding_mask[row].cpu()
        )
        ends = (key_places[row].cpu() + 1)[real]
        mask = spec.mask.over(int(ends.max()) if len(ends) else 0)
        query, key = query_places[row, :, None].cpu(), key_places[row, None, :].cpu()
        seen = [torch.as_tensor(mask.of_head(head).allows(query, key)) & real for head in range(spec.heads.query)]
        found.append(torch.stack(seen))
    return torch.stack(found).to(operands.query.device)


def distances(operands: AttentionInputs) -> Tensor:
    """The distance j - i of every pair, int64 [batch or 1, query, key]."""
    query, key = places(operands)
    return key[:, None, :] - query[:, :, None]


def weights_of(operands: AttentionInputs, place: str) -> Mapping[str, Tensor]:
    """The learned tensors of the spec's part `place`, by name."""
    start = place + "."
    return {name.removeprefix(start): weight for name, weight in operands.parameters.items() if name.startswith(start)}
