"""The options of DeepSeek sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import require_number, require_whole
from attn_core.errors import InvalidValue

COUNTS = ("index_heads", "index_size", "top")


@dataclass(frozen=True, kw_only=True)
class DsaConfig(MechanismConfig):
    """The indexer scores past tokens with `index_heads` heads of `index_size` elements; a query attends to its `top`
    tokens.

    `align` is the weight of the training loss that aligns the softmax of index scores with the attention weights.
    Rotary positions of index heads pair elements half of the rotated part apart, or neighbours if `index_interleaved`.
    """

    index_heads: int = 4
    index_size: int = 32
    top: int = 2048
    align: float = 1.0
    index_interleaved: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in COUNTS:
            require_whole(name, getattr(self, name), ge=1)
        require_number("align", self.align, ge=0)
        if self.rotary is not None and self.turned % 2:
            given = "{} of {} {}".format(self.rotary.fraction, *self.turned_like)
            raise InvalidValue.of("rotary.fraction", given, "a fraction that gives an even number of elements")

    @property
    def query_width(self) -> int:
        """The number of elements of the rows from which index queries are computed."""
        return self.hidden_size

    @property
    def index_queries(self) -> int:
        """The number of elements of the index queries of a token, and of the weights of their heads."""
        return self.index_heads * (self.index_size + 1)

    @property
    def every(self) -> int:
        """The number of tokens for each index key."""
        return 1

    def scores(self, keys: int) -> bool:
        """Whether the indexer scores so many keys: not those that are all chosen."""
        return keys // self.every > self.top // self.every

    @property
    def most(self) -> int:
        """The largest number of tokens that a query attends to: `top`, and all but one that have no index key yet."""
        return self.top + self.every - 1

    @property
    def turned_like(self) -> tuple[str, int]:
        """The name and the value of the size of which a fraction has rotary positions, in index heads."""
        return "index_size", self.index_size

    @property
    def turned(self) -> int:
        """The number of elements of an index head that rotary positions are applied to."""
        return 0 if self.rotary is None else int(self.turned_like[1] * self.rotary.fraction)
