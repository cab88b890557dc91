"""The cost of a mechanism, in closed form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes one call is priced at: `batch` sequences of `query` queries over `key` keys each."""

    batch: int = 1
    query: int = 1
    key: int = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Prices of one call of one layer, forward only.

    `flops` counts the matrix products of the plain computation, two per multiply-add, as torch's FLOP counter
    does; `allowed_flops` counts only the query-key pairs that the mask allows, which is what a perfect kernel
    would do. `parameters` is a number of weights.
    """

    flops: int
    allowed_flops: int
    parameters: int

    def __add__(self, other: Cost) -> Cost:
        """The price of both."""
        return Cost(
            flops=self.flops + other.flops,
            allowed_flops=self.allowed_flops + other.allowed_flops,
            parameters=self.parameters + other.parameters,
        )


@dataclass(frozen=True, kw_only=True)
class SelectedBlockPairs:
    """A query reads its own block of `block` keys, up to itself, and at most `top` - 1 earlier blocks.

    Counted are the pairs of one head, of queries that stand at the end of their keys.
    """

    block: int
    top: int

    def allowed(self, shape: Shape) -> int:
        """Pairs that are seen."""
        return shape.batch * (self._seen(shape.key) - self._seen(shape.key - shape.query))

    def met(self, shape: Shape) -> int:
        """Pairs that are computed: of whole sequences all of a block with all who stand in it or chose it.

        Queries behind other keys meet each of their blocks whole. Queries that only fill tiles, as in training, are
        not counted: fewer than a tile for each block.
        """
        if shape.query == shape.key:
            whole, rest = divmod(shape.key, self.block)
            return shape.batch * (whole * self.block**2 + rest**2 + self.block * self._earlier(shape.key, self.top - 1))
        first = shape.key - shape.query
        chosen = shape.query + self._earlier(shape.key, self.top - 1) - self._earlier(first, self.top - 1)
        return shape.batch * self.block * chosen

    def past(self, shape: Shape) -> int:
        """Pairs of a query and a block before its own."""
        blocks = -(-shape.key // self.block)
        return shape.batch * (self._earlier(shape.key, blocks) - self._earlier(shape.key - shape.query, blocks))

    def _seen(self, tokens: int) -> int:
        """Pairs that the first so many tokens see."""
        whole, rest = divmod(tokens, self.block)
        own = whole * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
        return own + self.block * self._earlier(tokens, self.top - 1)

    def _earlier(self, tokens: int, most: int) -> int:
        """Blocks before their own, `most` a token, that the first so many tokens read in all."""
        whole, rest = divmod(tokens, self.block)
        growing = min(whole, most)
        before = growing * (growing - 1) // 2 + (whole - growing) * most
        return self.block * before + rest * min(whole, most)
