"""Keys and values projected along the length (Wang et al. 2020, arXiv 2006.04768)."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_variants.whole_layer import softmax_over


class LengthProjection(nn.Module):
    """softmax(q (E k)ᵀ / √d) (F v), E and F [length, rank], uniform up to 1 / √rank.

    Learned: `key_weight` [sets, length, rank] and, unless keys and values share it, `value_weight`; one set is
    shared by all heads. Shorter sequences use the first rows.
    """

    def __init__(self, *, length: int, rank: int, sets: int, kinds: int) -> None:
        super().__init__()
        self.length = length
        self.key_weight = nn.Parameter(torch.empty(sets, length, rank))
        self.value_weight = nn.Parameter(torch.empty(sets, length, rank)) if kinds == 2 else None
        for weight in self.parameters():
            nn.init.uniform_(weight, -(rank**-0.5), rank**-0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; raises `InvalidValue` for more tokens than `length`."""
        tokens = key.shape[2]
        if tokens > self.length:
            raise InvalidValue.of("query", f"{tokens} tokens", f"at most {self.length}, for which it is built")
        if keep is not None:
            key, value = (rows.masked_fill(~keep[:, None, :, None], 0.0) for rows in (key, value))
        into_key = self.key_weight[:, :tokens].to(key.dtype).transpose(-1, -2)
        into_value = into_key
        if self.value_weight is not None:
            into_value = self.value_weight[:, :tokens].to(key.dtype).transpose(-1, -2)
        scores = torch.matmul(query, torch.matmul(into_key, key).transpose(-1, -2)) * query.shape[-1] ** -0.5
        return torch.matmul(softmax_over(scores, None), torch.matmul(into_value, value))
