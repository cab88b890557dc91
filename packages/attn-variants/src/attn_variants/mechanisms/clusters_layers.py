"""What LSH, routing, clustered and Sinkhorn attention compute between the projections and the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from attn_variants.layer_utils import softmax_over
from attn_variants.mechanisms.whole_sequence_layer import ranks

OWN_SCORE = -5e4
"""Of a token with itself, which it thereby sees only where it sees nothing else."""


class Buckets(nn.Module):
    """Tokens, which are queries and keys, meet those of the same bucket; see `HashBuckets`.

    Buckets have numbers from 0 to `count`, exclusive.
    """

    order: type[Order]

    def __init__(self, *, count: int, chunk: int, within: str, duplicates: str) -> None:
        super().__init__()
        self.count = count
        self.chunk = chunk
        self.within = within
        self.duplicates = duplicates

    def attend(self, buckets: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `buckets` [batch, heads, rounds, tokens], int64."""
        tokens, size = key.shape[2:]
        order = self.sort(buckets, key_padding_mask)
        padding = (0, 0, 0, order.chunks * self.chunk - tokens)
        rows, values = pad(key, padding), pad(value, padding)
        queries, pair_values = order.gathered(rows), order.seen(order.gathered(values))
        keys = order.seen(order.gathered(normalize(rows, dim=-1)))
        scores = torch.matmul(queries, keys.transpose(-1, -2)) * size**-0.5
        own = order.tokens[..., :, None] == order.seen(order.tokens)[..., None, :]
        scores = torch.where(own, OWN_SCORE, scores)
        if self.duplicates == "corrected":
            scores = scores - order.times_met(self.within).to(scores.dtype).log()
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~order.allowed(self.within), lowest)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        out = order.back(torch.matmul(torch.exp(scores - total), pair_values))
        shares = torch.softmax(order.back(total), dim=2)
        return (out * shares).sum(2)[:, :, :tokens]

    @torch.no_grad()
    def sort(self, buckets: Tensor, key_padding_mask: Tensor | None) -> Order:
        """The order of the tokens in each round: by bucket, then by place; padding last."""
        tokens = buckets.shape[-1]
        real = torch.ones_like(buckets[:, 0, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        chunks = (tokens + self.chunk - 1) // self.chunk
        length = chunks * self.chunk
        real = pad(real, (0, length - tokens))
        buckets = pad(buckets, (0, length - tokens)).masked_fill(~real[:, None, None], self.count)
        places = torch.arange(length, device=buckets.device)
        order = (buckets * length + places).argsort(-1)
        place = torch.zeros_like(order).scatter(-1, order, places.expand_as(order))
        last = (real.sum(-1) - 1).clamp(min=0) // self.chunk
        return self.order(
            order=order, place=place, bucket=buckets, real=real, last=last, chunks=chunks, chunk=self.chunk
        )


class HashBuckets(Buckets):
    """Queries, which are the keys too, meet those that a random rotation hashes to the same bucket.

    In each of `rounds`, tokens are sorted by bucket and place and cut into chunks of `chunk`; a token sees its own
    chunk and the one before (before the first stands the last), of these only its own bucket where `within` is
    "bucket".
    Rounds are merged by their sums of exponentials; where `duplicates` are "corrected", a pair that meets in several
    rounds counts once. Rotations are drawn from `seed`.
    """

    def __init__(
        self, *, size: int, buckets: int, chunk: int, rounds: int, seed: int, within: str, duplicates: str
    ) -> None:
        super().__init__(count=buckets, chunk=chunk, within=within, duplicates=duplicates)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(rounds, size, buckets // 2, generator=generator, dtype=torch.float64, device="cpu")
        self.rotations: Tensor
        self.register_buffer("rotations", drawn, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `key` is the query."""
        return self.attend(self.buckets(query), key, value, key_padding_mask)

    @torch.no_grad()
    def buckets(self, query: Tensor) -> Tensor:
        """arg max [xR; -xR] of every token, [batch, heads, rounds, tokens], int64."""
        turned = torch.matmul(query[:, :, None], self.rotations.to(query.dtype))
        return torch.cat([turned, -turned], dim=-1).argmax(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Tokens sorted into chunks, round by round.

    `order` and its inverse `place` [batch, heads, rounds, length]; `bucket` of every token; `real` [batch, length];
    `last` [batch] is the last chunk with a real token.
    """

    order: Tensor
    place: Tensor
    bucket: Tensor
    real: Tensor
    last: Tensor
    chunks: int
    chunk: int

    @property
    def tokens(self) -> Tensor:
        """The token at every place, [batch, heads, rounds, chunks, chunk]."""
        return self._cut(self.order)

    @property
    def before(self) -> Tensor:
        """The chunk before each chunk, [batch, chunks]."""
        chunks = torch.arange(self.chunks, device=self.order.device)[None]
        return torch.where(chunks == 0, self.last[:, None], chunks - 1)

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows [batch, heads, length, size] in the order of each round, [batch, heads, rounds, chunks, chunk, size]."""
        every = rows[:, :, None].expand(-1, -1, self.order.shape[2], -1, -1)
        index = self.order[..., None].expand(*self.order.shape, rows.shape[-1])
        gathered = every.gather(3, index)
        return gathered.reshape(*self.tokens.shape, rows.shape[-1])

    def seen(self, rows: Tensor) -> Tensor:
        """Rows [batch, heads, rounds, chunks, chunk, ...] of each chunk and of the one before, [..., 2 chunk, ...]."""
        before = self.before[:, None, None, :, *[None] * (rows.ndim - 4)].expand(rows.shape)
        return torch.cat([rows, rows.gather(3, before)], dim=4)

    def allowed(self, within: str) -> Tensor:
        """Which pairs may meet, [batch, heads, rounds, chunks, chunk, 2 chunk]."""
        bucket = self._cut(self.bucket.gather(-1, self.order))
        real = self._cut(self.real[:, None, None].expand_as(self.order).gather(-1, self.order))
        chunks = torch.arange(self.chunks, device=bucket.device)
        other = (self.before != chunks)[:, None, None, :, None].expand(*bucket.shape)
        met = torch.cat([torch.ones_like(other), other], dim=4)
        allowed = (met & self.seen(real))[..., None, :]
        if within == "bucket":
            same: Tensor = bucket[..., :, None] == self.seen(bucket)[..., None, :]
            return allowed & same
        return allowed.expand(*bucket.shape, 2 * self.chunk)

    def times_met(self, within: str) -> Tensor:
        """In how many rounds a pair meets, at least 1, [batch, heads, rounds, chunks, chunk, 2 chunk], int64."""
        one, other = self.tokens, self.seen(self.tokens)
        met = torch.zeros((), dtype=torch.int64, device=one.device)
        for turn in range(self.order.shape[2]):
            chunk = self.place[:, :, turn] // self.chunk
            before = self.before[:, None].expand(-1, chunk.shape[1], -1).gather(-1, chunk)
            mine, back, theirs = of_tokens(chunk, one), of_tokens(before, one), of_tokens(chunk, other)
            both = (mine[..., :, None] == theirs[..., None, :]) | (back[..., :, None] == theirs[..., None, :])
            if within == "bucket":
                bucket = self.bucket[:, :, turn]
                both = both & (of_tokens(bucket, one)[..., :, None] == of_tokens(bucket, other)[..., None, :])
            met = met + both.to(torch.int64)
        return met.clamp(min=1)

    def back(self, rows: Tensor) -> Tensor:
        """Rows [batch, heads, rounds, chunks, chunk, size] in the order of the tokens, chunks joined."""
        joined = rows.flatten(3, 4)
        return joined.gather(3, self.place[..., None].expand(*self.place.shape, rows.shape[-1]))

    def _cut(self, facts: Tensor) -> Tensor:
        """Facts [..., length] as [..., chunks, chunk]."""
        return facts.reshape(*facts.shape[:-1], self.chunks, self.chunk)


class JoinedOrder(Order):
    """The first chunk of a round follows the last of the round before, as in the authors' code."""

    def seen(self, rows: Tensor) -> Tensor:
        """As `Order.seen`."""
        own, before = super().seen(rows).chunk(2, dim=4)
        first = before[:, :, :, :1].roll(1, dims=2)
        return torch.cat([own, torch.cat([first, before[:, :, :, 1:]], dim=3)], dim=4)


Buckets.order = Order


class JoinedBuckets(HashBuckets):
    """The chunks of all rounds stand in one ring; what a chunk sees of another round counts once more."""

    order = JoinedOrder


def of_tokens(facts: Tensor, tokens: Tensor) -> Tensor:
    """Facts [batch, heads, length] of some tokens [batch, heads, ...]."""
    return facts.gather(-1, tokens.flatten(2)).reshape(tokens.shape)


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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        group = self.groups(query, key_padding_mask)
        scale = query.shape[-1] ** -0.5
        allowed = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        mean = self._sums(query, group, key_padding_mask) / self._sums(
            torch.ones_like(query[..., :1]), group, key_padding_mask
        ).clamp(min=1)
        weights = softmax_over(torch.matmul(mean, key.mT) * scale, allowed)
        out = torch.matmul(weights, value)
        if self.top == 0:
            return _at(out, group)
        mass, index = weights.topk(min(self.top, key.shape[2]), dim=-1)
        rest = out - torch.matmul(mass[..., None, :], _rows(value, index)).squeeze(-2)
        near = index.gather(2, group[..., None].expand(*group.shape, index.shape[-1]))
        scores = torch.matmul(query[..., None, :], _rows(key, near).mT) * scale
        own = softmax_over(scores, None if key_padding_mask is None else _kept(key_padding_mask, near)[..., None, :])
        exact = torch.matmul(own, _rows(value, near)).squeeze(-2)
        return _at(rest, group) + _at(mass.sum(-1, keepdim=True), group) * exact

    @torch.no_grad()
    def groups(self, query: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """The group of every query, [batch, heads, tokens], int64."""
        projected = torch.matmul(query, self.projection.to(query.dtype))
        codes = torch.where(projected >= 0, 1.0, -1.0).to(query.dtype)
        _, count = ranks(key_padding_mask, query)
        first = torch.arange(self.clusters, device=query.device) * count // self.clusters
        real = torch.ones_like(codes[:, 0, :, 0]) if key_padding_mask is None else key_padding_mask.to(codes.dtype)
        # Real tokens in their order, then padding: the sort is stable.
        token = (1 - real).argsort(dim=-1, stable=True).gather(-1, first)
        centres = _at(codes, token[:, None].expand(-1, codes.shape[1], -1))
        for _ in range(self.iterations):
            nearest = torch.matmul(codes, centres.mT).argmax(-1)
            sums = self._sums(codes, nearest, key_padding_mask)
            centres = torch.where(sums == 0, centres, sums.sign())
        return torch.matmul(codes, centres.mT).argmax(-1)

    def _sums(self, rows: Tensor, group: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Sums [batch, heads, clusters, size] of the real rows of each group."""
        if key_padding_mask is not None:
            rows = rows.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
        sums = torch.zeros(*rows.shape[:2], self.clusters, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        return sums.scatter_add(2, group[..., None].expand(rows.shape), rows)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, rows, size] at index [batch, heads, places]."""
    return rows.gather(2, index[..., None].expand(*index.shape, rows.shape[-1]))


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, tokens, size] at index [batch, heads, places, top], a size more."""
    return _at(rows, index.flatten(2)).reshape(*index.shape, rows.shape[-1])


def _kept(key_padding_mask: Tensor, index: Tensor) -> Tensor:
    """Which of the tokens at index [batch, heads, places, top] are real."""
    return key_padding_mask[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)


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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        near = [torch.matmul(self._rows_of_one(rows), self.centroids.to(rows.dtype).mT) for rows in (query, key)]
        if self.training:
            self._follow((query, key), near, key_padding_mask)
        taken = [self._taken(similar, key_padding_mask) for similar in near]
        real = [self._real(index, key_padding_mask) for index in taken]
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

    def _taken(self, near: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """The tokens of every cluster, [batch, heads, clusters, window], of similarities [batch, heads, tokens,
        clusters]."""
        if key_padding_mask is not None:
            near = near.masked_fill(~key_padding_mask[:, None, :, None], float("-inf"))
        return near.topk(min(self.window, near.shape[2]), dim=2).indices.mT

    @staticmethod
    def _real(index: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        if key_padding_mask is None:
            return None
        return key_padding_mask[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)

    @torch.no_grad()
    def _follow(self, rows: tuple[Tensor, Tensor], near: list[Tensor], key_padding_mask: Tensor | None) -> None:
        directions, similar = torch.cat([normalize(one, dim=-1) for one in rows], dim=2), torch.cat(near, dim=2)
        nearest = torch.nn.functional.one_hot(similar.argmax(-1), similar.shape[-1]).to(directions.dtype)
        if key_padding_mask is not None:
            nearest = nearest * torch.cat([key_padding_mask, key_padding_mask], dim=1)[:, None, :, None]
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


LOWEST = -1e30
"""The logarithm of nothing, finite so that differences of it are."""


class SortedBlocks(nn.Module):
    """A token attends to its own block of `block` tokens and to one mixed of all blocks for its own.

    Blocks are mixed by a matrix whose rows and columns sum to one: `iterations` times normalised exponentials of the
    products of the blocks' mean queries and mean keys, divided by √size and the `temperature`.
    """

    def __init__(self, *, block: int, iterations: int, temperature: float) -> None:
        super().__init__()
        self.block = block
        self.iterations = iterations
        self.temperature = temperature

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        tokens = query.shape[2]
        blocks = (tokens + self.block - 1) // self.block
        spare = blocks * self.block - tokens
        real = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        real = pad(real, (0, spare)).reshape(-1, blocks, self.block)
        queries, keys, values = (self._blocks(rows, real, spare) for rows in (query, key, value))
        mix = self.mixture(queries, keys, real)
        sorted_keys, sorted_values = (self._mixed(mix, rows) for rows in (keys, values))
        seen = self.seen(real)
        scores = torch.matmul(queries, torch.cat([keys, sorted_keys], dim=3).mT) * query.shape[-1] ** -0.5
        out = torch.matmul(softmax_over(scores, seen), torch.cat([values, sorted_values], dim=3))
        return out.flatten(2, 3)[:, :, :tokens]

    def seen(self, real: Tensor) -> Tensor:
        """Which rows of their own block and of the mixed one tokens see, [batch, 1, blocks, block or 1, 2 block]."""
        return torch.cat([real, real.any(1, keepdim=True).expand_as(real)], dim=-1)[:, None, :, None]

    def mixture(self, queries: Tensor, keys: Tensor, real: Tensor) -> Tensor:
        """Shares [batch, heads, blocks, blocks] of blocks in blocks, of rows [batch, heads, blocks, block, size].

        Padding must be zero; blocks of nothing else, by `real` [batch, blocks, block], have no share.
        """
        count = real.sum(-1).clamp(min=1)[:, None, :, None]
        asking, asked = (rows.sum(3) / count for rows in (queries, keys))
        scale = queries.shape[-1] ** -0.5 / self.temperature
        pairs = self.pairs(real.any(-1))[:, None]
        shares = (torch.matmul(self.asking(asking), asked.mT) * scale).masked_fill(~pairs, LOWEST)
        for _ in range(self.iterations):
            shares = (shares - shares.logsumexp(-1, keepdim=True)).masked_fill(~pairs, LOWEST)
            shares = (shares - self.column_sums(shares)).masked_fill(~pairs, LOWEST)
        return torch.exp(shares)

    def pairs(self, some: Tensor) -> Tensor:
        """Which blocks have shares in which, [batch, blocks, blocks]; `some` [batch, blocks] have a real token."""
        return some[:, :, None] & some[:, None, :]

    def asking(self, means: Tensor) -> Tensor:
        """The query of each row of the mixture, of mean queries [batch, heads, blocks, size]."""
        return means

    def column_sums(self, shares: Tensor) -> Tensor:
        """Logarithms of what columns are divided by, which broadcast to shares [batch, heads, blocks, blocks]."""
        return shares.logsumexp(-2, keepdim=True)

    def _blocks(self, rows: Tensor, real: Tensor, spare: int) -> Tensor:
        """Rows as [batch, heads, blocks, block, size], zeros for padding."""
        cut = pad(rows, (0, 0, 0, spare)).reshape(*rows.shape[:2], real.shape[1], self.block, rows.shape[-1])
        return cut.masked_fill(~real[:, None, :, :, None], 0.0)

    @staticmethod
    def _mixed(mix: Tensor, rows: Tensor) -> Tensor:
        return torch.matmul(mix, rows.flatten(3)).reshape(rows.shape)
