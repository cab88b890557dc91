"""The options of native sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig, Shape, Step
from attn_core.checks import require_whole
from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class NsaConfig(MechanismConfig):
    """Sizes in tokens: a block of `compress` tokens every `stride` tokens is compressed, `top` blocks of `select`
    tokens are selected, and the `window` includes the query's own token.

    `stride` divides the two block sizes.
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
        """The number of compressed blocks that start within `keys` keys."""
        return -(-keys // self.stride)

    def compressed_seen(self, shape: Shape | Step) -> int:
        """The number of pairs of a query and a compressed block that ends at or before it, for one head."""
        return shape.batch * (self._compressed_upto(shape.key) - self._compressed_upto(shape.key - shape.query))

    def _compressed_upto(self, tokens: int) -> int:
        whole, rest = divmod(max(0, tokens - self.compress + 1), self.stride)
        return self.stride * whole * (whole + 1) // 2 + rest * (whole + 1)
