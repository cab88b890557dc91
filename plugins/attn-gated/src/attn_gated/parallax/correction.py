"""Softmax weights, corrected along a second query."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention, Rotary
from attn_core.masking import allowed_pairs, of_query_heads, positions, shares, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PIECE = 1 << 21
"""The largest number of scores that are held at once, except in compiled code."""


class Correction(InnerAttention, nn.Module):
    """p (1 + r · (E_p[k] - k)) for softmax weights p and second queries r, which are not scaled.

    Learned: `second` (`nn.Linear` from `hidden_size` to the second queries of all heads, Glorot uniform).
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.spec = spec
        self.second = nn.Linear(hidden_size, spec.heads.query * spec.heads.key_size, bias=bias)
        nn.init.xavier_uniform_(self.second.weight)
        if bias:
            nn.init.zeros_(self.second.bias)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Outputs [batch, query, heads, value_size]."""
        both, key, allowed = self._parts(rows, operands)
        value = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2))
        scores = max(1, value[..., 0].numel())
        length = both[0].shape[2] if torch.compiler.is_compiling() else max(1, PIECE // scores)

        def read(first: Tensor, second: Tensor, seen: Tensor) -> Tensor:
            return corrected(first, second, key, seen) @ value

        pieces = zip(*(torch.split(part, length, dim=2) for part in (*both, allowed)), strict=True)
        # Scores are not stored for the backward pass, which recomputes them piece by piece.
        again = both[0].shape[2] > length and torch.is_grad_enabled()
        out = [checkpoint(read, *piece, use_reentrant=False) if again else read(*piece) for piece in pieces]
        return torch.cat(out, dim=2).transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Corrected weights [batch, heads, query, key]."""
        both, key, allowed = self._parts(rows, operands)
        return corrected(*both, key, allowed)

    def _parts(self, rows: Tensor, operands: AttentionInputs) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Scaled queries and second queries, and keys, [batch, heads, query or key, size], and the allowed pairs."""
        heads = self.spec.heads
        second = torch.unflatten(wide(self.second(rows)), -1, (heads.query, heads.key_size))
        if self.spec.rotary is not None:
            second = turned(second, self.spec.rotary, positions(operands)[0])
        query = wide(operands.query) * heads.key_size**-0.5
        key = of_query_heads(heads, wide(operands.key).transpose(1, 2))
        both = query.transpose(1, 2), second.transpose(1, 2)
        return both, key, allowed_pairs(self.spec.mask, operands).expand(-1, -1, query.shape[1], -1)


def corrected(query: Tensor, second: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """Corrected weights [batch, heads, query, key] of queries, second queries and keys [batch, heads, ..., size]."""
    weights, along = shares(query @ key.transpose(-1, -2), allowed), second @ key.transpose(-1, -2)
    return weights * (1 + (weights * along).sum(-1, keepdim=True) - along)


def turned(rows: Tensor, rotary: Rotary, places: Tensor) -> Tensor:
    """Rows [batch, token, heads, size] with rotary positions [batch or 1, token], as those of queries."""
    size = int(rows.shape[-1] * rotary.fraction)
    frequencies = torch.tensor(rotary.frequencies(size), dtype=torch.float64, device=rows.device)
    angles = (places.double()[..., None] * frequencies)[:, :, None]
    cosines, sines = ((part * rotary.attention_factor).to(rows.dtype) for part in (angles.cos(), angles.sin()))
    part = rows[..., :size]
    first, second = (part[..., ::2], part[..., 1::2]) if rotary.interleaved else part.chunk(2, dim=-1)
    pair = first * cosines - second * sines, second * cosines + first * sines
    joined = torch.stack(pair, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([joined, rows[..., size:]], dim=-1)
