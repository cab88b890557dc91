"""The options of native sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
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
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidValue.of(name, getattr(self, name), "a whole number from 1")
        for name in ("compress", "select"):
            if getattr(self, name) % self.stride:
                raise InvalidValue.of(name, getattr(self, name), f"a multiple of the stride {self.stride}")

    def compressed(self, keys: int) -> int:
        """How many compressed blocks begin within so many keys."""
        return -(-keys // self.stride)
