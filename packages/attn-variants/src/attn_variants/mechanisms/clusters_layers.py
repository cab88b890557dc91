"""The inner modules, between the projections and the output, of LSH, routing, clustered and Sinkhorn attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attn_core.auxiliary_loss import recomputing
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot, pad

from attn_variants.compute.distribution import softmax_over
from attn_variants.mechanisms.whole_sequence_layer import ranks

OWN_SCORE = -5e4
"""The score of a token with itself, so low that it attends to itself only if it sees no other token."""


class Buckets(nn.Module):
    """Attention of tokens, which are both queries and keys, within their bucket; see `HashBuckets`.

    Buckets are numbered from 0 to `count`, exclusive.
    """

    order: type[Order]

    def __init__(self, *, count: int, chunk: int, within: str, duplicates: str) -> None:
        super().__init__()
        self.count = count
        self.chunk = chunk
        self.within = within
        self.duplicates = duplicates

    def attend(self, buckets: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `buckets` of the tokens are [batch, heads, rounds, tokens], int64."""
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
            scores = scores - order.count_of_rounds(self.within).to(scores.dtype).log()
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~order.allowed(self.within), lowest)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        out = order.back(torch.matmul(torch.exp(scores - total), pair_values))
        round_weights = torch.softmax(order.back(total), dim=2)
        return (out * round_weights).sum(2)[:, :, :tokens]

    @torch.no_grad()
    def sort(self, buckets: Tensor, key_padding_mask: Tensor | None) -> Order:
        """Sort the tokens of each round by bucket, then by position, with padding last."""
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
    """LSH attention: queries, which are also the keys, attend to those that random rotations hash to the same bucket.

    In each of `rounds`, tokens are sorted by bucket and position and cut into chunks of `chunk`. A token sees its own
    chunk and the one before (for the first, the last one), and if `within` is "bucket" only its own bucket in these.
    Rounds are merged by their sums of exponentials. If `duplicates` are "corrected", a pair that is allowed in several
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
        """The hash bucket of every token, arg max [xR; -xR], [batch, heads, rounds, tokens], int64."""
        turned = torch.matmul(query[:, :, None], self.rotations.to(query.dtype))
        return torch.cat([turned, -turned], dim=-1).argmax(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Tokens sorted into chunks, round by round.

    `order` is the token at each place and `place` its inverse, both [batch, heads, rounds, length]; `bucket` is that of
    each token; `real` [batch, length] is True for real tokens; `last` [batch] is the last chunk with a real token.
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
        """Sort rows [batch, heads, length, size] into [batch, heads, rounds, chunks, chunk, size]."""
        every = rows[:, :, None].expand(-1, -1, self.order.shape[2], -1, -1)
        index = self.order[..., None].expand(*self.order.shape, rows.shape[-1])
        gathered = every.gather(3, index)
        return gathered.reshape(*self.tokens.shape, rows.shape[-1])

    def seen(self, rows: Tensor) -> Tensor:
        """Concatenate rows [batch, heads, rounds, chunks, chunk, ...] of each chunk and of the one before it.

        Returns [batch, heads, rounds, chunks, 2 chunk, ...].
        """
        before = self.before[:, None, None, :, *[None] * (rows.ndim - 4)].expand(rows.shape)
        return torch.cat([rows, rows.gather(3, before)], dim=4)

    def allowed(self, within: str) -> Tensor:
        """Bool [batch, heads, rounds, chunks, chunk, 2 chunk], True for allowed pairs."""
        bucket = self._cut(self.bucket.gather(-1, self.order))
        real = self._cut(self.real[:, None, None].expand_as(self.order).gather(-1, self.order))
        chunks = torch.arange(self.chunks, device=bucket.device)
        other = (self.before != chunks)[:, None, None, :, None].expand(*bucket.shape)
        distinct = torch.cat([torch.ones_like(other), other], dim=4)
        allowed = (distinct & self.seen(real))[..., None, :]
        if within == "bucket":
            same: Tensor = bucket[..., :, None] == self.seen(bucket)[..., None, :]
            return allowed & same
        return allowed.expand(*bucket.shape, 2 * self.chunk)

    def count_of_rounds(self, within: str) -> Tensor:
        """In how many rounds a pair is allowed, at least 1, [batch, heads, rounds, chunks, chunk, 2 chunk], int64."""
        one, other = self.tokens, self.seen(self.tokens)
        rounds = torch.zeros((), dtype=torch.int64, device=one.device)
        for index in range(self.order.shape[2]):
            chunk = self.place[:, :, index] // self.chunk
            before = self.before[:, None].expand(-1, chunk.shape[1], -1).gather(-1, chunk)
            mine, back, theirs = of_tokens(chunk, one), of_tokens(before, one), of_tokens(chunk, other)
            both = (mine[..., :, None] == theirs[..., None, :]) | (back[..., :, None] == theirs[..., None, :])
            if within == "bucket":
                bucket = self.bucket[:, :, index]
                both = both & (of_tokens(bucket, one)[..., :, None] == of_tokens(bucket, other)[..., None, :])
            rounds = rounds + both.to(torch.int64)
        return rounds.clamp(min=1)

    def back(self, rows: Tensor) -> Tensor:
        """Undo the sorting: [batch, heads, rounds, chunks, chunk, size] to [batch, heads, rounds, length, size]."""
        joined = rows.flatten(3, 4)
        return joined.gather(3, self.place[..., None].expand(*self.place.shape, rows.shape[-1]))

    def _cut(self, facts: Tensor) -> Tensor:
        """Reshape [..., length] to [..., chunks, chunk]."""
        return facts.reshape(*facts.shape[:-1], self.chunks, self.chunk)


class JoinedOrder(Order):
    """An `Order` in which the first chunk of a round follows the last of the round before, as in the authors' code."""

    def seen(self, rows: Tensor) -> Tensor:
        """See `Order.seen`."""
        own, before = super().seen(rows).chunk(2, dim=4)
        first = before[:, :, :, :1].roll(1, dims=2)
        return torch.cat([own, torch.cat([first, before[:, :, :, 1:]], dim=3)], dim=4)


Buckets.order = Order


class JoinedBuckets(HashBuckets):
    """`HashBuckets` whose chunks of all rounds form one ring; pairs across two rounds count an additional time."""

    order = JoinedOrder


def of_tokens(facts: Tensor, tokens: Tensor) -> Tensor:
    """Gather per-token values [batch, heads, length] at token indices [batch, heads, ...]."""
    return facts.gather(-1, tokens.flatten(2)).reshape(tokens.shape)


class Clustered(nn.Module):
    """Clustered attention: queries are grouped into `clusters`, and each group attends once, with its mean query.

    Groups are found by `iterations` of Lloyd's algorithm on `bits` signs of random projections, drawn from `seed`. Each
    query then redistributes the weight that its group gave to its `top` keys among them by its own scores; 0 skips
    this.
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
        # Real tokens in their original order, then padding, as the sort is stable.
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
    """Gather rows [batch, heads, rows, size] at indices [batch, heads, places]."""
    return rows.gather(2, index[..., None].expand(*index.shape, rows.shape[-1]))


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows [batch, heads, tokens, size] at indices [batch, heads, places, top] into [..., top, size]."""
    return _at(rows, index.flatten(2)).reshape(*index.shape, rows.shape[-1])


def _kept(key_padding_mask: Tensor, index: Tensor) -> Tensor:
    """Bool, True if the token at each of the indices [batch, heads, places, top] is real."""
    return key_padding_mask[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)


class Centroids(nn.Module):
    """Unit vectors that follow the rows nearest to them: the buffer `centroids` [heads, clusters, size].

    They are drawn from `seed`. Training passes only add up directions; `after_update` moves each centroid to their mean
    direction, as a moving average with rate 1 - `decay`, so that all passes of an update see the same centroids.
    """

    def __init__(self, *, heads: int, size: int, clusters: int, decay: float, seed: int) -> None:
        super().__init__()
        self.decay = decay
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(heads, clusters, size, generator=generator, device="cpu")
        self.centroids: Tensor
        self.register_buffer("centroids", normalize(drawn, dim=-1))
        self._seen: Tensor | None = None

    @torch.no_grad()
    def note(self, rows: Tensor, nearest: Tensor, key_padding_mask: Tensor | None) -> None:
        """Add up the directions of real rows [batch, heads, tokens, size] by their `nearest` centroids [..., tokens].

        The mask is [batch, tokens]. Only a training pass is counted, and only once if it is computed again.
        """
        if not self.training or recomputing():
            return
        taken = one_hot(nearest, self.centroids.shape[1]).to(rows.dtype)
        if key_padding_mask is not None:
            taken = taken * key_padding_mask[:, None, :, None]
        sums = torch.matmul(taken.mT, normalize(rows, dim=-1)).sum(0)
        seen = torch.cat([sums, taken.sum((0, 2))[..., None]], dim=-1)
        self._seen = seen if self._seen is None else self._seen + seen

    @torch.no_grad()
    def after_update(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Move the centroids by what training passes saw since the last call, summed over workers by `summed`."""
        if self._seen is None:
            return
        seen, self._seen = summed(self._seen), None
        mean = normalize(seen[..., :-1], dim=-1).to(self.centroids.dtype)
        moved = normalize(self.decay * self.centroids + (1 - self.decay) * mean, dim=-1)
        self.centroids.copy_(torch.where(seen[..., -1:] > 0, moved, self.centroids))


class Routing(Centroids):
    """Routing attention: in each cluster, the `window` queries nearest to its centroid attend to the `window` keys.

    A token in several clusters gets the mean of their outputs, a token in none gets zero. The centroids follow the
    queries and keys nearest to them.
    """

    def __init__(self, *, heads: int, size: int, clusters: int, window: int, decay: float, seed: int) -> None:
        super().__init__(heads=heads, size=size, clusters=clusters, decay=decay, seed=seed)
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        near = [torch.matmul(self._rows_of_one(rows), self.centroids.to(rows.dtype).mT) for rows in (query, key)]
        for rows, similar in zip((query, key), near, strict=True):
            self.note(rows, similar.argmax(-1), key_padding_mask)
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
        """The tokens of every cluster, [batch, heads, clusters, window], by similarities `near` [batch, heads, tokens,
        clusters]."""
        if key_padding_mask is not None:
            near = near.masked_fill(~key_padding_mask[:, None, :, None], float("-inf"))
        return near.topk(min(self.window, near.shape[2]), dim=2).indices.mT

    @staticmethod
    def _real(index: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        if key_padding_mask is None:
            return None
        return key_padding_mask[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows [batch, heads, tokens, size] at indices [batch, heads, clusters, window]."""
    flat = index.flatten(2)[..., None].expand(*rows.shape[:2], -1, rows.shape[-1])
    return rows.gather(2, flat).reshape(*index.shape, rows.shape[-1])


def mean_of_clusters(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Means over clusters [batch, heads, tokens, size] of rows [batch, heads, clusters, window, size + 1].

    The last column is the weight of each row, 0 or 1.
    """
    flat = rows.flatten(2, 3)
    where = index.flatten(2)[..., None].expand(flat.shape)
    sums = torch.zeros(*flat.shape[:2], tokens, flat.shape[-1], dtype=rows.dtype, device=rows.device)
    sums = sums.scatter_add(2, where, flat)
    return sums[..., :-1] / sums[..., -1:].clamp(min=1)


LOWEST = -1e30
"""The logarithm used for zero, finite so that differences of it are finite."""


class SortedBlocks(nn.Module):
    """Sinkhorn attention: a token attends to its own block of `block` tokens and to a mixture of all blocks.

    The mixing matrix, whose rows and columns sum to one, is obtained by `iterations` of Sinkhorn normalisation from the
    exponentials of the products of mean queries and mean keys of the blocks, divided by √size and the `temperature`.
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
        """Which rows of their own and of the mixed block queries see, bool [batch, 1, blocks, block or 1, 2 block]."""
        return torch.cat([real, real.any(1, keepdim=True).expand_as(real)], dim=-1)[:, None, :, None]

    def mixture(self, queries: Tensor, keys: Tensor, real: Tensor) -> Tensor:
        """The mixing matrix [batch, heads, blocks, blocks] for queries and keys [batch, heads, blocks, block, size].

        Padded rows must be zero. Blocks without a real token, according to `real` [batch, blocks, block], get no share.
        """
        count = real.sum(-1).clamp(min=1)[:, None, :, None]
        mean_queries, mean_keys = (rows.sum(3) / count for rows in (queries, keys))
        scale = queries.shape[-1] ** -0.5 / self.temperature
        pairs = self.pairs(real.any(-1))[:, None]
        logits = (torch.matmul(self.row_queries(mean_queries), mean_keys.mT) * scale).masked_fill(~pairs, LOWEST)
        for _ in range(self.iterations):
            logits = (logits - logits.logsumexp(-1, keepdim=True)).masked_fill(~pairs, LOWEST)
            logits = (logits - self.column_sums(logits)).masked_fill(~pairs, LOWEST)
        return torch.exp(logits)

    def pairs(self, some: Tensor) -> Tensor:
        """Bool [batch, blocks, blocks], True if the second block may have a share in the first's mixture.

        `some` [batch, blocks] is True for blocks with a real token.
        """
        return some[:, :, None] & some[:, None, :]

    def row_queries(self, means: Tensor) -> Tensor:
        """The query of each row of the mixing matrix, from mean queries [batch, heads, blocks, size]."""
        return means

    def column_sums(self, logits: Tensor) -> Tensor:
        """Logarithms of the column sums, which broadcast with `logits` [batch, heads, blocks, blocks]."""
        return logits.logsumexp(-2, keepdim=True)

    def _blocks(self, rows: Tensor, real: Tensor, spare: int) -> Tensor:
        """Cut rows into [batch, heads, blocks, block, size], with zeros for padding."""
        cut = pad(rows, (0, 0, 0, spare)).reshape(*rows.shape[:2], real.shape[1], self.block, rows.shape[-1])
        return cut.masked_fill(~real[:, None, :, :, None], 0.0)

    @staticmethod
    def _mixed(mix: Tensor, rows: Tensor) -> Tensor:
        return torch.matmul(mix, rows.flatten(3)).reshape(rows.shape)
