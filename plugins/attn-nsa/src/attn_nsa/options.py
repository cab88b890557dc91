"""The options of native sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig, Shape
from attn_core.chosen import length_of, rows_met
from attn_core.errors import InvalidValue

PIECE = 1 << 21
"""Most scores of selected keys held at once, but while compiling."""


@dataclass(frozen=True, kw_only=True)
class NsaConfig(MechanismConfig):
    """Sizes in tokens: compressed blocks of `compress` every `stride`, `top` selected blocks of `select`, a `window`.

    `stride` divides the two block sizes. The window counts the query's own token.
    """

    compress: int = 32
    stride: int = 16
    select: int = 64
    top: int = 16
    window: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compress", "stride", "select", "top", "window"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidValue.of(name, getattr(self, name), "a whole number from 1")
        for name in ("compress", "select"):
            if getattr(self, name) % self.stride:
                raise InvalidValue.of(name, getattr(self, name), f"a multiple of the stride {self.stride}")

    def rows_met(self, shared: int, shape: Shape) -> int:
        """How many rows of queries meet a selected block in one group, whose keys so many heads share."""
        each = shape.batch * shared * self.top * self.select
        length = length_of(PIECE, each, shape.query)
        return rows_met(shape.query, self.top, -(-shape.key // self.select), length)

    def compressed(self, keys: int) -> int:
        """How many compressed blocks begin within so many keys."""
        return -(-keys // self.stride)
