"""The layer of mechanisms that need the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from attn_core import Heads
from attn_core.masking import wide
from torch import Tensor, nn

from attn_variants.attention.projections import refuse_source


class WholeLayer(nn.Module):
    """Projections of inputs of `hidden_size` around `inner`, which computes attention over whole sequences.

    `inner(query, key, value, key_padding_mask)` takes [batch, heads, tokens, size] in at least float32 and
    `key_padding_mask` [batch, tokens], bool, or None, and returns [batch, heads, tokens, size]; its outputs for padding
    are zeroed. Learned: the projections `query`, `key`, `value` and `output`, and the parameters of `inner`. With
    `shared`, queries are also the keys, and there is no `key`.
    """

    def __init__(self, inner: nn.Module, heads: Heads, *, hidden_size: int, bias: bool, shared: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.inner = inner
        into = heads.query * heads.key_size
        self.query = nn.Linear(hidden_size, into, bias=bias)
        self.key = None if shared else nn.Linear(hidden_size, into, bias=bias)
        self.value = nn.Linear(hidden_size, heads.query * heads.value_size, bias=bias)
        self.output = nn.Linear(heads.query * heads.value_size, hidden_size, bias=bias)
        for linear in (self.query, self.key, self.value, self.output):
            if linear is None:
                continue
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        refuse_source(source)
        if query.shape[1] == 0:
            return query.clone()
        queries = self._rows(self.query, query)
        keys = queries if self.key is None else self._rows(self.key, query)
        out = self.inner(queries, keys, self._rows(self.value, query), key_padding_mask)
        if key_padding_mask is not None:
            out = out.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
        projected: Tensor = self.output(out.transpose(1, 2).flatten(-2).to(query.dtype))
        return projected

    def _rows(self, linear: Any, rows: Tensor) -> Tensor:
        return wide(linear(rows).unflatten(-1, (self.heads.query, -1)).transpose(1, 2))


def ranks(key_padding_mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each token among the real ones [batch, tokens], and the number of these [batch, 1], int64.

    `like` is [batch, heads, tokens, size]."""
    batch, _, tokens, _ = like.shape
    real = (
        torch.ones(batch, tokens, dtype=torch.int64, device=like.device)
        if key_padding_mask is None
        else key_padding_mask.to(torch.int64)
    )
    return real.cumsum(-1) - 1, real.sum(-1, keepdim=True)
