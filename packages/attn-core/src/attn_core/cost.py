"""The cost of a mechanism, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one call of `forward`: `batch` whole sequences of `query` queries over `key` keys each.

    Keys are the tokens of the source where attention is cross; else they are those of the queries, so that both numbers
    are equal.
    """

    batch: int = 1
    query: int = 1
    key: int = 1

    @property
    def whole(self) -> bool:
        """Whether layers compute whole sequences at once: always."""
        return True

    @property
    def remembered(self) -> int:
        """Tokens of each sequence that earlier calls computed: none."""
        return 0

    @property
    def source(self) -> int:
        """Tokens of each source: the keys, where attention is cross."""
        return self.key

    @property
    def encoded(self) -> int:
        """Tokens of each source that this call projects to keys and values: all."""
        return self.key


@dataclass(frozen=True, kw_only=True)
class Step:
    """The sizes of one engine step: `batch` requests compute `new` tokens each, after `remembered` ones.

    Where attention is cross, each request has a source of `source` tokens, which `encode` projected before.
    """

    batch: int = 1
    new: int = 1
    remembered: int = 0
    source: int = 0

    @property
    def whole(self) -> bool:
        """Whether sequences start with several tokens, which attention layers compute like whole sequences."""
        return self.remembered == 0 and self.new > 1

    @property
    def query(self) -> int:
        """Queries of each request: its new tokens."""
        return self.new

    @property
    def key(self) -> int:
        """Tokens of each request, its new ones included."""
        return self.remembered + self.new

    @property
    def encoded(self) -> int:
        """Tokens of each source that this call projects to keys and values: none."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one call of one layer, forward only.

    `flops` counts the matrix products of the plain computation, two per multiply-add, as torch's FLOP counter
    does; `allowed_flops` counts only the query-key pairs that the mask allows, which is what an ideal kernel
    would compute. `parameters` is the number of weights. Raises `InvalidValue` for a negative number.
    """

    flops: int
    allowed_flops: int
    parameters: int

    def __post_init__(self) -> None:
        for field in ("flops", "allowed_flops", "parameters"):
            if getattr(self, field) < 0:
                raise InvalidValue.of(f"cost.{field}", getattr(self, field), "a number from 0")

    def __add__(self, other: Cost) -> Cost:
        """The sum of both costs."""
        return Cost(
            flops=self.flops + other.flops,
            allowed_flops=self.allowed_flops + other.allowed_flops,
            parameters=self.parameters + other.parameters,
        )


@dataclass(frozen=True, kw_only=True)
class SelectedBlockPairs:
    """Numbers of pairs where a query reads its own block of `block` keys, up to itself, and `top` - 1 earlier blocks.

    They are pairs of one head; queries are aligned to the end of their keys. A query reads fewer earlier blocks where
    there are fewer.
    """

    block: int
    top: int
    tile: int = 64

    def allowed(self, shape: Shape | Step) -> int:
        """Query-key pairs that are allowed."""
        return shape.batch * (self._allowed_pairs(shape.key) - self._allowed_pairs(shape.key - shape.query))

    def met(self, shape: Shape | Step) -> int:
        """Query-key pairs that are computed: in whole sequences, every key of a block for every query that reads it.

        Queries after cached keys are computed in tiles of `tile` queries that read the same block, one of which may be
        partly empty for each block. Training on whole sequences uses tiles, too, which is not counted.
        """
        if shape.whole:
            whole, rest = divmod(shape.key, self.block)
            return shape.batch * (
                whole * self.block**2 + rest**2 + self.block * self._earlier_blocks(shape.key, self.top - 1)
            )
        tile, blocks = max(1, min(self.tile, shape.query)), -(-shape.key // self.block)
        choices = shape.query * min(self.top, blocks)
        return shape.batch * min(choices, choices // tile + blocks) * tile * self.block

    def past(self, shape: Shape | Step) -> int:
        """Pairs of a query and a block before its own."""
        blocks = -(-shape.key // self.block)
        return shape.batch * (
            self._earlier_blocks(shape.key, blocks) - self._earlier_blocks(shape.key - shape.query, blocks)
        )

    def _allowed_pairs(self, tokens: int) -> int:
        """Query-key pairs that are allowed for the first `tokens` queries."""
        whole, rest = divmod(tokens, self.block)
        own = whole * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
        return own + self.block * self._earlier_blocks(tokens, self.top - 1)

    def _earlier_blocks(self, tokens: int, most: int) -> int:
        """Blocks before their own, at most `most` per token, that the first `tokens` tokens read in total."""
        whole, rest = divmod(tokens, self.block)
        growing = min(whole, most)
        before = growing * (growing - 1) // 2 + (whole - growing) * most
        return self.block * before + rest * min(whole, most)
