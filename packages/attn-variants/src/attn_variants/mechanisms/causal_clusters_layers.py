"""The inner modules, between the projections and the output, of causal LSH, routing and Sinkhorn attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from attn_variants.mechanisms.clusters_layers import Buckets, Centroids, HashBuckets, Order, SortedBlocks, of_tokens


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


class CausalRouting(Centroids):
    """Each token sees the last `window` tokens with the same nearest centroid, and itself only if it sees no other.

    The centroids follow the queries nearest to them.
    """

    def __init__(self, *, heads: int, size: int, clusters: int, window: int, decay: float, seed: int) -> None:
        super().__init__(heads=heads, size=size, clusters=clusters, decay=decay, seed=seed)
        self.near = CausalBuckets(count=clusters, chunk=window, within="bucket", duplicates="counted")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `key` is the query."""
        similar = torch.matmul(normalize(query.detach(), dim=-1), self.centroids.to(query.dtype).mT)
        nearest = similar.argmax(-1)
        out = self.near.attend(nearest[:, :, None], key, value, key_padding_mask)
        self.note(query, nearest, key_padding_mask)
        return out


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
