"""Forget gates of channels, and softmax attention whose scores they multiply."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention
from attn_core.decays import decayed_pairs
from attn_core.kernels.base import batch_invariant
from attn_core.masking import allowed_pairs, of_query_heads, positions, shares, wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint


class Parts(NamedTuple):
    """Scaled queries and keys [batch, heads, query or key, size], the sums of gates' logarithms `sums` up to each key
    [batch, heads, key, size], those of scalar gates `scalars` [batch, heads, key, 1], zero without any, float64 both,
    and the rows of the queries among the keys, [batch, query]."""

    query: Tensor
    key: Tensor
    sums: Tensor
    scalars: Tensor
    places: Tensor


class ChannelGates(InnerAttention, nn.Module):
    """Softmax attention of which each channel of a score decays.

    Learned: `gate` (`nn.Linear` from `hidden_size` to one gate per head and channel, then one per head if there are
    scalar gates; Glorot uniform). Outputs of at most `most` queries are computed at once.
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, hidden_size: int, start: float, *, scalar: bool, most: int) -> None:
        super().__init__()
        self.spec, self.scalar, self.most = spec, scalar, most
        self.gate = nn.Linear(hidden_size, spec.heads.query * (spec.heads.key_size + scalar))
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.constant_(self.gate.bias, float(start))

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:  # noqa: ARG002 -- the same everywhere
        """The fields "gate" [..., heads, key_size] and, with scalar gates, "scalar" [..., heads]: logarithms, at least
        float32."""
        heads = self.spec.heads
        both = torch.unflatten(logsigmoid(wide(self.gate(rows))), -1, (heads.query, -1))
        scalar = {"scalar": both[..., -1]} if self.scalar else {}
        return {"gate": both[..., : heads.key_size], **scalar}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size], in tiles of queries but in compiled code."""
        tokens = rows.shape[1]
        if tokens == 0:
            return attend(operands)
        value = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2))
        if batch_invariant():
            out = self.weights(rows, operands, attend) @ value
        else:
            given = self._parts(operands), value, operands.key_padding_mask
            if torch.compiler.is_compiling() or tokens <= self.most:
                out = tile(*given, slice(None))
            else:
                parts = [slice(start, start + self.most) for start in range(0, tokens, self.most)]
                # Scores are not stored for the backward pass, which recomputes them tile by tile.
                again = torch.is_grad_enabled()
                found = [
                    checkpoint(tile, *given, at, use_reentrant=False) if again else tile(*given, at) for at in parts
                ]
                out = torch.cat(found, dim=2)
        return out.transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key]."""
        parts = self._parts(operands)
        passed = (at(parts.sums, parts.places)[:, :, :, None] - parts.sums[:, :, None]).clamp(max=0).exp()
        scores = (parts.query[:, :, :, None] * parts.key[:, :, None] * passed.to(parts.query)).sum(-1)
        further = at(parts.scalars, parts.places) - parts.scalars.transpose(-1, -2)
        return shares(scores + further.to(scores), allowed_pairs(self.spec.mask, operands))

    def _parts(self, operands: AttentionInputs) -> Parts:
        heads, real = self.spec.heads, operands.key_padding_mask
        query = wide(operands.query).transpose(1, 2) * heads.key_size**-0.5
        key = of_query_heads(heads, wide(operands.key).transpose(1, 2))
        gates = operands.fields["gate"].double()
        scalars = operands.fields["scalar"].double() if self.scalar else gates.new_zeros(gates.shape[:-1])
        both = torch.cat([gates, scalars[..., None]], dim=-1)
        if real is not None:
            both = both.masked_fill(~real[..., None, None], 0.0)
        sums = both.cumsum(1).transpose(1, 2)
        places = positions(operands)[0].expand(len(query), -1)
        return Parts(query, key, sums[..., :-1], sums[..., -1:], places)


def at(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [batch, heads, query, size] at `places` [batch, query] of rows [batch, heads, key, size]."""
    places = places.clamp(min=0, max=max(0, rows.shape[2] - 1))
    return rows.gather(2, places[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))


def tile(parts: Parts, value: Tensor, real: Tensor | None, some: slice) -> Tensor:
    """Outputs [batch, heads, tile, value_size] of some queries; `real` [batch, key] are the keys that are no padding.

    Keys before the first query's own are read through the decay up to it, so that both factors of a channel are at most
    1; those of the tile pairwise.
    """
    query, places = parts.query[:, :, some], parts.places[:, some]
    first = places[:, :1]
    anchor = at(parts.sums, first)
    own = at(parts.sums, places) - anchor
    ours, keys = own.to(query), torch.arange(parts.key.shape[2], device=places.device)
    early = parts.key * (anchor - parts.sums).clamp(max=0).exp().to(query)
    past = (query * ours.clamp(max=0).exp()) @ early.transpose(-1, -2)
    near = decayed_pairs(query, at(parts.key, places), ours)
    here = at(parts.scalars, places)
    scores = torch.cat(
        [
            past + (here - parts.scalars.transpose(-1, -2)).to(past),
            near + (here - here.transpose(-1, -2)).to(near),
        ],
        dim=-1,
    )
    before = (keys < first).expand(len(places), -1)
    within = places < parts.key.shape[2]
    if real is not None:
        before = before & real
        within = within & real.gather(1, places.clamp(min=0, max=max(0, real.shape[1] - 1)))
    seen = torch.cat(
        [
            before[:, None].expand(-1, places.shape[1], -1),
            within[:, None] & (places[:, None] <= places[:, :, None]),
        ],
        dim=-1,
    )
    both = torch.cat([value, at(value, places)], dim=2)
    return shares(scores, seen[:, None]) @ both
