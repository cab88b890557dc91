"""The options of native sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig, Shape, Step
from attn_core.checks import require_whole
from attn_core.errors import InvalidValue


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
            require_whole(name, getattr(self, name), ge=1)
        for name in ("compress", "select"):
            if getattr(self, name) % self.stride:
                raise InvalidValue.of(name, getattr(self, name), f"a multiple of the stride {self.stride}")

    def compressed(self, keys: int) -> int:
        """How many compressed blocks begin within so many keys."""
        return -(-keys // self.stride)

    def compressed_seen(self, shape: Shape | Step) -> int:
        """Pairs of a query and a compressed block that ends before it or with it, of one head."""
        return shape.batch * (self._compressed_upto(shape.key) - self._compressed_upto(shape.key - shape.query))

    def _compressed_upto(self, tokens: int) -> int:
        whole, rest = divmod(max(0, tokens - self.compress + 1), self.stride)
        return self.stride * whole * (whole + 1) // 2 + rest * (whole + 1)
