"""Attention of clusters of queries (Vyas et al. 2020, arXiv 2007.04825)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_variants.whole_layer import ranks, softmax_over


class Clustered(nn.Module):
    """Queries are grouped into `clusters` and each group attends once, with its mean query.

    Groups are found by `iterations` of Lloyd's algorithm on `bits` signs of random projections, drawn from `seed`. The
    `top` keys of a group are then weighed anew by each of its queries, with the mass that the group gave them; 0 leaves
    this out.
    """

    def __init__(self, *, size: int, clusters: int, bits: int, iterations: int, top: int, seed: int) -> None:
        super().__init__()
        self.clusters = clusters
        self.iterations = iterations
        self.top = top
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(size, bits, generator=generator, dtype=torch.float64, device="cpu")
        self.projection: Tensor
        self.register_buffer("projection", drawn, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        group = self.groups(query, keep)
        scale = query.shape[-1] ** -0.5
        allowed = None if keep is None else keep[:, None, None, :]
        mean = self._sums(query, group, keep) / self._sums(torch.ones_like(query[..., :1]), group, keep).clamp(min=1)
        weights = softmax_over(torch.matmul(mean, key.mT) * scale, allowed)
        out = torch.matmul(weights, value)
        if self.top == 0:
            return _at(out, group)
        mass, index = weights.topk(min(self.top, key.shape[2]), dim=-1)
        rest = out - torch.matmul(mass[..., None, :], _rows(value, index)).squeeze(-2)
        near = index.gather(2, group[..., None].expand(*group.shape, index.shape[-1]))
        scores = torch.matmul(query[..., None, :], _rows(key, near).mT) * scale
        own = softmax_over(scores, None if keep is None else _kept(keep, near)[..., None, :])
        exact = torch.matmul(own, _rows(value, near)).squeeze(-2)
        return _at(rest, group) + _at(mass.sum(-1, keepdim=True), group) * exact

    @torch.no_grad()
    def groups(self, query: Tensor, keep: Tensor | None) -> Tensor:
        """The group of every query, [batch, heads, tokens], int64."""
        projected = torch.matmul(query, self.projection.to(query.dtype))
        codes = torch.where(projected >= 0, 1.0, -1.0).to(query.dtype)
        _, count = ranks(keep, query)
        first = torch.arange(self.clusters, device=query.device) * count // self.clusters
        real = torch.ones_like(codes[:, 0, :, 0]) if keep is None else keep.to(codes.dtype)
        # Real tokens in their order, then padding: the sort is stable.
        token = (1 - real).argsort(dim=-1, stable=True).gather(-1, first)
        centres = _at(codes, token[:, None].expand(-1, codes.shape[1], -1))
        for _ in range(self.iterations):
            nearest = torch.matmul(codes, centres.mT).argmax(-1)
            sums = self._sums(codes, nearest, keep)
            centres = torch.where(sums == 0, centres, sums.sign())
        return torch.matmul(codes, centres.mT).argmax(-1)

    def _sums(self, rows: Tensor, group: Tensor, keep: Tensor | None) -> Tensor:
        """Sums [batch, heads, clusters, size] of the real rows of each group."""
        if keep is not None:
            rows = rows.masked_fill(~keep[:, None, :, None], 0.0)
        sums = torch.zeros(*rows.shape[:2], self.clusters, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        return sums.scatter_add(2, group[..., None].expand(rows.shape), rows)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, rows, size] at index [batch, heads, places]."""
    return rows.gather(2, index[..., None].expand(*index.shape, rows.shape[-1]))


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, tokens, size] at index [batch, heads, places, top], a size more."""
    return _at(rows, index.flatten(2)).reshape(*index.shape, rows.shape[-1])


def _kept(keep: Tensor, index: Tensor) -> Tensor:
    """Which of the tokens at index [batch, heads, places, top] are real."""
    return keep[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)
