"""Attention within hash buckets (Reformer, Kitaev et al. 2020, arXiv 2001.04451, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

OWN_SCORE = -5e4
"""Of a token with itself, which it thereby sees only where it sees nothing else."""


class HashBuckets(nn.Module):
    """Queries, which are the keys too, meet those that a random rotation hashes to the same bucket.

    In each of `rounds`, tokens are sorted by bucket and place and cut into chunks of `chunk`; a token sees its own
    chunk and the one before (before the first stands the last), of these only its own bucket where `within` is
    "bucket".
    Rounds are merged by their sums of exponentials; where `duplicates` are "corrected", a pair that meets in several
    rounds counts once. Rotations are drawn from `seed`.
    """

    order: type[Order]

    def __init__(
        self, *, size: int, buckets: int, chunk: int, rounds: int, seed: int, within: str, duplicates: str
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.within = within
        self.duplicates = duplicates
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(rounds, size, buckets // 2, generator=generator, dtype=torch.float64, device="cpu")
        self.rotations: Tensor
        self.register_buffer("rotations", drawn, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; `key` is the query."""
        tokens, size = key.shape[2:]
        order = self.sort(self.buckets(query), key_padding_mask)
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
    def buckets(self, query: Tensor) -> Tensor:
        """arg max [xR; -xR] of every token, [batch, heads, rounds, tokens], int64."""
        turned = torch.matmul(query[:, :, None], self.rotations.to(query.dtype))
        return torch.cat([turned, -turned], dim=-1).argmax(-1)

    @torch.no_grad()
    def sort(self, buckets: Tensor, key_padding_mask: Tensor | None) -> Order:
        """The order of the tokens in each round: by bucket, then by place; padding last."""
        tokens = buckets.shape[-1]
        real = torch.ones_like(buckets[:, 0, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        chunks = (tokens + self.chunk - 1) // self.chunk
        length = chunks * self.chunk
        real = pad(real, (0, length - tokens))
        buckets = pad(buckets, (0, length - tokens)).masked_fill(~real[:, None, None], 2 * self.rotations.shape[-1])
        places = torch.arange(length, device=buckets.device)
        order = (buckets * length + places).argsort(-1)
        place = torch.zeros_like(order).scatter(-1, order, places.expand_as(order))
        last = (real.sum(-1) - 1).clamp(min=0) // self.chunk
        return self.order(
            order=order, place=place, bucket=buckets, real=real, last=last, chunks=chunks, chunk=self.chunk
        )


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
            mine, back, theirs = _of(chunk, one), _of(before, one), _of(chunk, other)
            both = (mine[..., :, None] == theirs[..., None, :]) | (back[..., :, None] == theirs[..., None, :])
            if within == "bucket":
                bucket = self.bucket[:, :, turn]
                both = both & (_of(bucket, one)[..., :, None] == _of(bucket, other)[..., None, :])
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


HashBuckets.order = Order


class JoinedBuckets(HashBuckets):
    """The chunks of all rounds stand in one ring; what a chunk sees of another round counts once more."""

    order = JoinedOrder


def _of(facts: Tensor, tokens: Tensor) -> Tensor:
    """Facts [batch, heads, length] of some tokens [batch, heads, ...]."""
    return facts.gather(-1, tokens.flatten(2)).reshape(tokens.shape)
