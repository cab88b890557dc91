"""The options of attention to indexed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import require_number, require_whole
from attn_core.errors import InvalidValue

TILE = 256
"""The number of queries whose index scores are computed at once, or that of a block if it is larger."""


@dataclass(frozen=True, kw_only=True)
class IndexedBlocksConfig(MechanismConfig):
    """Blocks have `block` tokens; a query reads at most `top` of them, of which the `local` newest always.

    Index heads have `index_size` elements, of which as many as of a head have rotary positions. `norm_eps` is that
    of the norms of queries and keys and of index queries and keys; None for no norms of queries and keys. `align` is
    the weight of the training loss that aligns the softmax of the scores of blocks with the attention that they get.
    """

    index_size: int = 128
    block: int = 128
    top: int = 16
    local: int = 1
    norm_eps: float | None = 1e-6
    align: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("index_size", "block", "top", "local"):
            require_whole(name, getattr(self, name), ge=1)
        require_number("norm_eps", self.norm_eps, gt=0, optional=True)
        require_number("align", self.align, ge=0)
        if self.local > self.top:
            raise InvalidValue.of("local", self.local, f"at most the top {self.top}")
        if self.turned > self.index_size:
            raise InvalidValue.of("index_size", self.index_size, f"at least {self.turned}, the rotated elements")

    def reads_all(self, keys: int) -> bool:
        """Whether queries read all blocks of so many keys, so that nothing is chosen."""
        return keys <= self.top * self.block

    def scored(self, queries: int, keys: int) -> Iterator[tuple[int, int]]:
        """The tiles of the last `queries` of `keys` tokens: how many are scored at once, and with how many keys, those
        of the blocks before the last one's own."""
        length = max(1, TILE // self.block) * self.block
        for start in range(keys - queries, keys, length):
            stop = min(start + length, keys)
            yield stop - start, (stop - 1) // self.block * self.block

    @property
    def turned(self) -> int:
        """The number of elements of a head, and of an index head, that rotary positions are applied to."""
        return 0 if self.rotary is None else int(self.head_layout.key_size * self.rotary.fraction)
