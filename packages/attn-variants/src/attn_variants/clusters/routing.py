"""Attention within clusters that are learned online (Roy et al. 2021, arXiv 2003.05997)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from attn_variants.whole_layer import softmax_over


class Routing(nn.Module):
    """Each of `clusters` takes the `window` queries and the `window` keys nearest to its centroid, which attend.

    A token that several clusters take gets the mean of their outputs, one that none takes gets zero. Centroids
    `centroids` [heads, clusters, size], a buffer of length one, start at random from `seed` and in training follow the
    mean direction of queries and keys that are nearest to them, by 1 - `decay` a call.
    """

    def __init__(self, *, heads: int, size: int, clusters: int, window: int, decay: float, seed: int) -> None:
        super().__init__()
        self.window = window
        self.decay = decay
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(heads, clusters, size, generator=generator, device="cpu")
        self.centroids: Tensor
        self.register_buffer("centroids", normalize(drawn, dim=-1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        near = [torch.matmul(self._rows_of_one(rows), self.centroids.to(rows.dtype).mT) for rows in (query, key)]
        if self.training:
            self._follow((query, key), near, keep)
        taken = [self._taken(similar, keep) for similar in near]
        real = [self._real(index, keep) for index in taken]
        queries, keys, values = (
            rows_at(rows, index) for rows, index in ((query, taken[0]), (key, taken[1]), (value, taken[1]))
        )
        scores = torch.matmul(queries, keys.mT) * query.shape[-1] ** -0.5
        allowed = None if real[1] is None else real[1][..., None, :]
        out = torch.matmul(softmax_over(scores, allowed), values)
        weight = torch.ones_like(out[..., :1]) if real[0] is None else real[0][..., None].to(out.dtype)
        return mean_of_clusters(torch.cat([out * weight, weight], dim=-1), taken[0], query.shape[2])

    @staticmethod
    def _rows_of_one(rows: Tensor) -> Tensor:
        return normalize(rows.detach(), dim=-1)

    def _taken(self, near: Tensor, keep: Tensor | None) -> Tensor:
        """The tokens of every cluster, [batch, heads, clusters, window], of similarities [batch, heads, tokens,
        clusters]."""
        if keep is not None:
            near = near.masked_fill(~keep[:, None, :, None], float("-inf"))
        return near.topk(min(self.window, near.shape[2]), dim=2).indices.mT

    @staticmethod
    def _real(index: Tensor, keep: Tensor | None) -> Tensor | None:
        if keep is None:
            return None
        return keep[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)

    @torch.no_grad()
    def _follow(self, rows: tuple[Tensor, Tensor], near: list[Tensor], keep: Tensor | None) -> None:
        directions, similar = torch.cat([normalize(one, dim=-1) for one in rows], dim=2), torch.cat(near, dim=2)
        nearest = torch.nn.functional.one_hot(similar.argmax(-1), similar.shape[-1]).to(directions.dtype)
        if keep is not None:
            nearest = nearest * torch.cat([keep, keep], dim=1)[:, None, :, None]
        sums = torch.matmul(nearest.mT, directions).sum(0)
        moved = self.decay * self.centroids + (1 - self.decay) * normalize(sums, dim=-1).to(self.centroids.dtype)
        met = nearest.sum((0, 2)) > 0
        self.centroids.copy_(torch.where(met[..., None], normalize(moved, dim=-1), self.centroids))


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, tokens, size] at index [batch, heads, clusters, window]."""
    flat = index.flatten(2)[..., None].expand(*rows.shape[:2], -1, rows.shape[-1])
    return rows.gather(2, flat).reshape(*index.shape, rows.shape[-1])


def mean_of_clusters(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Means [batch, heads, tokens, size] of rows [batch, heads, clusters, window, size + 1]; the last column weighs."""
    flat = rows.flatten(2, 3)
    where = index.flatten(2)[..., None].expand(flat.shape)
    sums = torch.zeros(*flat.shape[:2], tokens, flat.shape[-1], dtype=rows.dtype, device=rows.device)
    sums = sums.scatter_add(2, where, flat)
    return sums[..., :-1] / sums[..., -1:].clamp(min=1)
