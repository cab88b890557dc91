"""Selection of blocks of keys, and attention to them."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention, installed
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksDispatcher
from attn_core.masking import counted, positions, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad

NEVER = float("-inf")


def choose(query: Tensor, key: Tensor, key_padding_mask: Tensor, own: Tensor, top: int) -> Tensor:
    """The chosen blocks [batch, query, heads, chosen], int64: the own one, then the best before it; -1 for none.

    The number chosen is the smaller of `top` and the number of blocks.

    `query` is [batch, query, heads, size], `key` [batch, block, heads, within, size], `key_padding_mask` [batch, block,
    within], and `own` [batch, query] the block that contains each query. A block's score is the product of the query
    and the mean of the block's real keys. No gradient flows through the choice.
    """
    with torch.no_grad():
        real = key_padding_mask[:, :, None, :, None]
        means = (key * real).sum(3) / real.sum(3).clamp(min=1)
        scores = query.transpose(1, 2) @ means.permute(0, 2, 3, 1)
        blocks = torch.arange(key.shape[1], device=query.device)
        past = (blocks < own[..., None]) & key_padding_mask.any(-1)[:, None]
        scores = scores.transpose(1, 2).masked_fill(~past[:, :, None], NEVER)
        best = scores.topk(max(0, min(top, key.shape[1]) - 1), dim=-1)
        others = best.indices.masked_fill(best.values == NEVER, -1)
        return torch.cat([own[:, :, None, None].expand(*others.shape[:3], 1), others], dim=-1)


class BlockMixture(InnerAttention, nn.Module):
    """Each query attends to its own block of `block` keys and to the `top` - 1 best of the blocks before it."""

    computes_itself = True
    reads_rows = False

    def __init__(self, spec: AttentionSpec, *, block: int, top: int) -> None:
        super().__init__()
        self.spec = spec
        self.block = block
        self.top = top
        self.plan = SelectedBlocksDispatcher(installed().kernels, spec.heads)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        if rows.shape[1] == 0:
            return attend(operands)
        chosen, places = self._chosen(operands)
        query = wide(operands.query) * self.spec.heads.key_size**-0.5
        key, value = (self._of_heads(rows).transpose(1, 2).contiguous() for rows in (operands.key, operands.value))
        blocks = KeyBlocks(key, value, self._blocks(self._keep(operands)))
        choices = SelectedBlocks(query.transpose(1, 2)[:, :, :, None], chosen.transpose(1, 2), places)
        found = self.plan.run(choices, blocks, operands)
        return found[:, :, :, 0].transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key], zero outside the chosen blocks."""
        chosen, places = self._chosen(operands)
        blocks = -(-operands.key.shape[1] // self.block)
        # The index -1, which means no block, is replaced by one after the last block.
        seen = torch.zeros(*chosen.shape[:-1], blocks + self.top, dtype=torch.bool, device=chosen.device)
        seen = seen.scatter(-1, torch.where(chosen < 0, blocks + self.top - 1, chosen), value=True)
        keys = seen[..., :blocks].repeat_interleave(self.block, dim=-1)[..., : operands.key.shape[1]].transpose(1, 2)
        past = counted(operands.key)[:, None, None] <= places[:, None, :, None]
        key = operands.key[:, :, list(self.spec.heads.group_of)]
        scores = torch.einsum("bqhd,bkhd->bhqk", wide(operands.query), wide(key)) * self.spec.heads.key_size**-0.5
        return shares(scores, keys & past & self._keep(operands)[:, None, None])

    def _chosen(self, operands: AttentionInputs) -> tuple[Tensor, Tensor]:
        """The blocks that `choose` returns, and the positions of the queries [batch, query]."""
        places = positions(operands)[0].expand(operands.query.shape[0], -1)
        keys = self._of_heads(operands.key), self._blocks(self._keep(operands))
        return choose(wide(operands.query), *keys, places // self.block, self.top), places

    def _keep(self, operands: AttentionInputs) -> Tensor:
        """The mask of real keys [batch, key], bool."""
        given = operands.key_padding_mask
        return operands.key.new_ones(operands.key.shape[:2], dtype=torch.bool) if given is None else given

    def _of_heads(self, rows: Tensor) -> Tensor:
        """Keys or values [batch, key, groups, size] by query head and block, [batch, block, heads, within, size]."""
        return self._blocks(wide(rows)[:, :, list(self.spec.heads.group_of)]).transpose(2, 3)

    def _blocks(self, rows: Tensor) -> Tensor:
        """Split `rows` [batch, key, ...] into blocks [batch, block, within, ...], padded with zeros at the end."""
        missing = -rows.shape[1] % self.block
        filled = pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
        return torch.unflatten(filled, 1, (-1, self.block))
