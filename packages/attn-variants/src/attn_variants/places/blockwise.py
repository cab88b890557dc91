"""Attention along paths of reflections of whole sequences, a block of queries at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import Heads
from attn_core.masking import LOWEST, of_query_heads, shares
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attn_variants.places.householder import Paths, in_blocks, split


@dataclass(frozen=True, eq=False)
class Passages:
    """What queries of later blocks need of each block, a tensor a block, of all query heads.

    `keys` [batch, heads, token, size] have met the reflections up to the end of their block, `passing` [batch, heads,
    size, size] is the product of all of them. `values` are [batch, heads, token, value_size] of the whole sequence and
    `key_padding_mask` [batch, token] says which tokens are real, None where all are.
    """

    keys: tuple[Tensor, ...]
    passing: tuple[Tensor, ...]
    values: Tensor
    key_padding_mask: Tensor | None

    def attend(self, query: Tensor, own: Tensor, number: int) -> Tensor:
        """Outputs [batch, heads, token, value_size] of the queries of one block.

        `query` [batch, heads, token, size] have gone back to the start of their block, whose own scores [batch, heads,
        token, token] are `own`.
        """
        ahead = own.new_ones(own.shape[-2:], dtype=torch.bool).triu(1)
        # Masked here: the gradient of a part of `scores` alone would keep that of all its columns in memory.
        columns = [own.masked_fill(ahead, LOWEST)]
        for earlier in reversed(range(number)):
            columns.append(query @ self.keys[earlier].transpose(-1, -2))
            if earlier:
                query = query @ self.passing[earlier]
        scores = torch.cat(columns[::-1], -1)
        keys = scores.shape[-1]
        if self.key_padding_mask is None:
            return scores.softmax(-1) @ self.values[:, :, :keys]
        seen = pad(~ahead, (keys - own.shape[-1], 0), value=True)
        return shares(scores, self.key_padding_mask[:, None, None, :keys] & seen) @ self.values[:, :, :keys]


def path_attention(
    heads: Heads, rows: tuple[Tensor, Tensor, Tensor], paths: Paths, key_padding_mask: Tensor | None, block: int
) -> Tensor:
    """Outputs [batch, heads, token, value_size] of whole sequences.

    `rows` are queries [batch, heads, token, size], keys and values [batch, key_value_heads, token, size];
    `key_padding_mask` [batch, token] or None. A query goes back through its own block of so many tokens, and then block
    by block, each of which turns it by one product (Yang et al. 2025, arXiv 2505.16381, section 3.3). The backward pass
    computes a block of queries again, so that memory grows with the length alone.
    """
    query, key, value = rows
    tokens = query.shape[2]
    if tokens == 0:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    parts = in_blocks(key, paths, block)
    met_keys = parts.key - parts.key_turns.transpose(-1, -2) @ parts.direction
    one = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    passing = one - parts.direction.transpose(-1, -2) @ parts.query_turns
    query = split(query, block)
    own_key, direction, key_turns, query_turns = (of_query_heads(heads, part) for part in parts)
    met = (query @ direction.transpose(-1, -2)).tril()
    own = query @ own_key.transpose(-1, -2) - met @ key_turns
    missing = query.shape[2] * block - tokens
    passages = Passages(
        of_query_heads(heads, met_keys).unbind(2),
        of_query_heads(heads, passing).unbind(2),
        of_query_heads(heads, pad(value, (0, 0, 0, missing))),
        None if key_padding_mask is None else pad(key_padding_mask, (0, missing)),
    )
    blocks = zip((query - met @ query_turns).unbind(2), own.unbind(2), range(query.shape[2]), strict=True)
    again = query.shape[2] > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    out = [
        checkpoint(passages.attend, *each, use_reentrant=False) if again else passages.attend(*each) for each in blocks
    ]
    return torch.cat(out, 2)[:, :, :tokens]
