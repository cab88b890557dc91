"""The inner modules, between the projections and the output, of causal LSH, routing and Sinkhorn attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot, pad

from attn_variants.mechanisms.clusters_layers import Buckets, HashBuckets, Order, SortedBlocks, of_tokens


class CausalOrder(Order):
    """An `Order` in which a token attends to the last tokens of its bucket, counted back from itself.

    In the order sorted by bucket and position, the distance between two tokens of a bucket depends only on the tokens
    between them, and so on no later token, wherever chunks begin.
    """

    def allowed(self, within: str) -> Tensor:
        """Like `Order.allowed`, restricted to the token itself and less than `chunk` places back."""
        ranks = torch.arange(self.order.shape[-1], device=self.order.device).expand_as(self.order)
        cut = ranks.reshape(self.tokens.shape)
        back = cut[..., :, None] - self.seen(cut)[..., None, :]
        return super().allowed(within) & (back >= 0) & (back < self.chunk)

    def count_of_rounds(self, within: str) -> Tensor:  # noqa: ARG002 -- buckets alone
        """In how many rounds a pair is allowed, at least 1, [batch, heads, rounds, chunks, chunk, 2 chunk], int64."""
        one, other = self.tokens, self.seen(self.tokens)
        rounds = torch.zeros((), dtype=torch.int64, device=one.device)
        for index in range(self.order.shape[2]):
            place, bucket = self.place[:, :, index], self.bucket[:, :, index]
            back = of_tokens(place, one)[..., :, None] - of_tokens(place, other)[..., None, :]
            same = of_tokens(bucket, one)[..., :, None] == of_tokens(bucket, other)[..., None, :]
            rounds = rounds + (same & (back >= 0) & (back < self.chunk)).to(torch.int64)
        return rounds.clamp(min=1)


class CausalBuckets(Buckets):
    """`Buckets` in which a token sees the last `chunk` tokens of its bucket, including itself."""

    order = CausalOrder


class CausalHashBuckets(HashBuckets):
    """`HashBuckets` in which a token sees the last `chunk` tokens of its bucket, including itself."""

    order = CausalOrder


class CausalRouting(nn.Module):
    """Each token sees the last `window` tokens with the same nearest centroid, and itself only if it sees no other.

    The buffer `centroids` [heads, clusters, size], of unit vectors, is drawn from `seed`. In training it follows the
    mean direction of the queries nearest to each centroid, as a moving average with rate 1 - `decay` per call.
    """

    def __init__(self, *, heads: int, size: int, clusters: int, window: int, decay: float, seed: int) -> None:
        super().__init__()
        self.decay = decay
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(heads, clusters, size, generator=generator, device="cpu")
        self.centroids: Tensor
        self.register_buffer("centroids", normalize(drawn, dim=-1))
        self.near = CausalBuckets(count=clusters, chunk=window, within="bucket", duplicates="counted")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `key` is the query."""
        similar = torch.matmul(normalize(query.detach(), dim=-1), self.centroids.to(query.dtype).mT)
        nearest = similar.argmax(-1)
        out = self.near.attend(nearest[:, :, None], key, value, key_padding_mask)
        if self.training:
            self._follow(query, nearest, key_padding_mask)
        return out

    @torch.no_grad()
    def _follow(self, rows: Tensor, nearest: Tensor, key_padding_mask: Tensor | None) -> None:
        taken = one_hot(nearest, self.centroids.shape[1]).to(rows.dtype)
        if key_padding_mask is not None:
            taken = taken * key_padding_mask[:, None, :, None]
        sums = torch.matmul(taken.mT, normalize(rows, dim=-1)).sum(0)
        moved = self.decay * self.centroids + (1 - self.decay) * normalize(sums, dim=-1).to(self.centroids.dtype)
        used = taken.sum((0, 2)) > 0
        self.centroids.copy_(torch.where(used[..., None], normalize(moved, dim=-1), self.centroids))


class CausalSortedBlocks(SortedBlocks):
    """A token attends to its own block up to itself, and to a mixture of the blocks before.

    Row b of the mixture is computed from the products of the mean query of block b - 1 with the mean keys of the blocks
    before b; columns are normalised by their sums over the rows up to b.
    """

    def seen(self, real: Tensor) -> Tensor:
        """See `SortedBlocks.seen`: tokens of the own block up to the query, and non-empty rows of the mixture."""
        places = torch.arange(self.block, device=real.device)
        own = real[:, :, None, :] & (places[:, None] >= places)
        before = pad(real.cumsum(1)[:, :-1] > 0, (0, 0, 1, 0)) & self._has_mixture(real.any(-1))[..., None]
        return torch.cat([own, before[:, :, None, :].expand_as(own)], dim=-1)[:, None]

    def pairs(self, some: Tensor) -> Tensor:
        """See `SortedBlocks.pairs`: the blocks before each block."""
        blocks = torch.arange(some.shape[1], device=some.device)
        return self._has_mixture(some)[:, :, None] & some[:, None, :] & (blocks[:, None] > blocks)

    def row_queries(self, means: Tensor) -> Tensor:
        """The mean query of the block before each block; zeros for the first."""
        return pad(means[:, :, :-1], (0, 0, 1, 0))

    def column_sums(self, logits: Tensor) -> Tensor:
        """See `SortedBlocks.column_sums`: sums over the rows so far."""
        return logits.logcumsumexp(-2)

    @staticmethod
    def _has_mixture(some: Tensor) -> Tensor:
        """Whether each block has a mixture, [batch, blocks]: it and the block before must have a real token."""
        return pad(some[:, :-1], (1, 0)) & some
