"""The options of QSA."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue

from attn_sparse.dsa.options import DsaConfig


@dataclass(frozen=True, kw_only=True)
class QsaConfig(DsaConfig):
    """Blocks have `block` tokens. A query attends to the tokens of its best complete blocks, `top` in all, and to those
    of the block that is not complete yet. As many elements of an index head as of a head have rotary positions.

    `norm_eps` is that of the norms of queries and keys, and of index queries and keys.
    """

    index_size: int = 128
    block: int = checked(64, require_whole, ge=1, unit="tokens")
    norm_eps: float = checked(1e-6, require_number, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top % self.block:
            raise InvalidValue.of("top", self.top, f"a multiple of the {self.block} tokens of a block")
        if self.turned > self.index_size:
            raise InvalidValue.of("index_size", self.index_size, f"at least {self.turned}, the rotated elements")

    @property
    def every(self) -> int:
        """The number of tokens for each index key."""
        return self.block

    @property
    def turned_like(self) -> tuple[str, int]:
        """As many elements have rotary positions as of a head."""
        return "head_size", self.head_layout.key_size

    @property
    def index_queries(self) -> int:
        """The number of elements of the index queries of a token; heads have no weights."""
        return self.index_heads * self.index_size
