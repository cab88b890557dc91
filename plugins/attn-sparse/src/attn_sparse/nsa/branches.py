"""The branches of NSA: compressed blocks, selected blocks and a window, weighted by gates."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention, installed
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksDispatcher
from attn_core.masking import positions, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_sparse.nsa.options import NsaConfig


class Compression(nn.Module):
    """φ compresses each block of `length` rows of `size` elements, one every `stride` rows, to a single row:
    W₂ relu(W₁ [r₁ + p₁; ...]).

    Learned, and shared by all heads: `places` [length, size], initially zero, and `mix` and `output` (`nn.Linear`
    without bias).
    """

    def __init__(self, size: int, *, length: int, stride: int) -> None:
        super().__init__()
        self.length = length
        self.stride = stride
        self.places = nn.Parameter(torch.zeros(length, size))
        self.mix = nn.Linear(length * size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)

    def forward(self, rows: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Compress `rows` [batch, key, heads, size] to [batch, block, heads, size]; padding counts as zeros."""
        blocks = windows(rows, self.length, self.stride) + self.places[:, None]
        blocks = blocks * windows(key_padding_mask, self.length, self.stride)[..., None, None]
        out: Tensor = self.output(torch.relu(self.mix(blocks.transpose(2, 3).flatten(3))))
        return out


class Means(nn.Module):
    """The mean of the real rows of each block, in place of `Compression`."""

    def __init__(self, length: int, stride: int) -> None:
        super().__init__()
        self.length, self.stride = length, stride

    def forward(self, rows: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Compress `rows` [batch, key, heads, size] to [batch, block, heads, size]."""
        real = windows(key_padding_mask, self.length, self.stride)[..., None, None]
        means = (windows(wide(rows), self.length, self.stride) * real).sum(2) / real.sum(2).clamp(min=1)
        return means.to(rows.dtype)


def windows(rows: Tensor, length: int, stride: int) -> Tensor:
    """Blocks [batch, block, length, ...] of `rows` [batch, key, ...], one every `stride`, with zeros at the end."""
    blocks = (rows.shape[1] + stride - 1) // stride
    missing = (blocks - 1) * stride + length - rows.shape[1]
    # A stride longer than a block would skip rows; the options do not allow it.
    filled = pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
    return filled.unfold(1, length, stride).movedim(-1, 2)


NEVER = float("-inf")
ALWAYS = 1e6
"""A score larger than any sum of attention weights."""


def select(shares_of_blocks: Tensor, own: Tensor, blocks: int, options: NsaConfig) -> Tensor:
    """The selected blocks [batch, groups, query, selected], int64, -1 if there are fewer.

    The number selected is the smaller of `options.top` and `blocks`, the number of blocks. No gradient flows through
    the choice.

    `shares_of_blocks` [batch, groups, query, compressed] are the attention weights of compressed blocks, summed over
    the heads of a group; `own` [batch, query] is the block that contains each query. The score of a block is the sum of
    the weights of the compressed blocks in it, each times its overlap (equation 9 of the paper); the own block, the
    first and the one before the own are always selected first.
    """
    with torch.no_grad():
        # A compressed block covers `cover` strides; each stride gets the weights of all compressed blocks over it.
        cover, strides = options.compress // options.stride, options.select // options.stride
        length = shares_of_blocks.shape[-1]
        behind = pad(shares_of_blocks, (cover - 1, blocks * strides - length))
        scores = sum(behind[..., shift : shift + blocks * strides] for shift in range(cover))
        scores = torch.as_tensor(scores).reshape(*behind.shape[:-1], blocks, strides).sum(-1)
        block = torch.arange(blocks, device=own.device)
        here = own[:, None, :, None]
        for rank, fixed in enumerate((block == here - 1, block == 0, block == here)):
            scores = scores.masked_fill(fixed, ALWAYS * (rank + 1))
        scores = scores.masked_fill(block > here, NEVER)
        # Scores can be equal, as ReLU lets φ give zeros: the stable sort then prefers the first blocks.
        ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
        best = slice(min(options.top, blocks))
        return indices[..., best].masked_fill(ordered[..., best] == NEVER, -1)


class Branches(InnerAttention, nn.Module):
    """Separate attentions to compressed, selected and near keys, weighted by sigmoid gates of the query's token.

    Learned: `compress_key`, `compress_value` (`Compression`, or `Means`) and `gates` (`nn.Linear`, three gates a head).
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: NsaConfig) -> None:
        super().__init__()
        heads, length, stride = spec.heads, options.compress, options.stride
        self.options = options
        self.plan = SelectedBlocksDispatcher(installed().kernels, heads)
        self.groups = heads.key_value
        self.scale: float = heads.key_size**-0.5
        self.compress_key, self.compress_value = (
            Compression(size, length=length, stride=stride) if options.compression == "mlp" else Means(length, stride)
            for size in (heads.key_size, heads.value_size)
        )
        self.gates = nn.Linear(options.hidden_size, 3 * heads.query, bias=options.gate_bias)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]; `attend` computes the window branch."""
        if rows.shape[1] == 0:
            return attend(operands)
        gates: Tensor = torch.unflatten(torch.sigmoid(self.gates(rows)), -1, (3, -1, 1))
        key_padding_mask = operands.key_padding_mask
        key_padding_mask = (
            operands.key.new_ones(operands.key.shape[:2], dtype=torch.bool)
            if key_padding_mask is None
            else key_padding_mask
        )
        places = positions(operands)[0].expand(operands.query.shape[0], -1)
        query = self._grouped(operands.query)
        compressed, weights = self._compressed(query, places, operands, key_padding_mask)
        selected = self._selected(query, weights, places, operands, key_padding_mask)
        far = [part.permute(0, 2, 1, 3, 4).flatten(2, 3).to(rows.dtype) for part in (compressed, selected)]
        branches = torch.stack([*far, attend(operands)], dim=2)
        out: Tensor = (branches * gates).sum(2)
        return out

    def _grouped(self, query: Tensor) -> Tensor:
        """Scaled queries [batch, query, heads, size] by key/value head, [batch, groups, query, shared, size]."""
        return torch.unflatten(wide(query), 2, (self.groups, -1)).transpose(1, 2) * self.scale

    def _compressed(
        self, query: Tensor, places: Tensor, operands: AttentionInputs, key_padding_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs [batch, groups, query, shared, value_size] and weights [batch, groups, query, shared, compressed] of
        attention to the compressed blocks that end at or before the query."""
        key = wide(self.compress_key(operands.key, key_padding_mask)).permute(0, 2, 3, 1)
        value = wide(self.compress_value(operands.value, key_padding_mask)).transpose(1, 2)
        options = self.options
        last = torch.arange(key.shape[-1], device=key.device) * options.stride + options.compress - 1
        real = windows(key_padding_mask, options.compress, options.stride).any(-1)
        seen = (last <= places[..., None]) & real[:, None]
        # Queries and heads are rows of one product: with a separate axis of queries torch would copy the keys for each.
        scores = torch.unflatten(query.flatten(2, 3) @ key, 2, query.shape[2:4])
        weights = shares(scores, seen[:, None, :, None])
        return torch.unflatten(weights.flatten(2, 3) @ value, 2, query.shape[2:4]), weights

    def _selected(
        self, query: Tensor, weights: Tensor, places: Tensor, operands: AttentionInputs, key_padding_mask: Tensor
    ) -> Tensor:
        """Outputs [batch, groups, query, shared, value_size] of attention to the selected blocks."""
        size = self.options.select
        key, value, real = (windows(rows, size, size) for rows in (operands.key, operands.value, key_padding_mask))
        chosen = select(weights.sum(3), places // size, key.shape[1], self.options)
        key, value = (wide(rows).permute(0, 3, 1, 2, 4).contiguous() for rows in (key, value))
        return self.plan.run(SelectedBlocks(query, chosen, places), KeyBlocks(key, value, real), operands)
