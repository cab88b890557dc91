"""The options of native sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig, Shape, Step
from attn_core.checks import checked, require_choice, require_whole
from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class NsaConfig(MechanismConfig):
    """Sizes in tokens: a block of `compress` tokens every `stride` tokens is compressed, `top` blocks of `select`
    tokens are selected, and the `window` includes the query's own token.

    `stride` divides the two block sizes. `compression` is the paper's "mlp" or the "mean" of a block, which learns
    nothing (flash-linear-attention, with blocks of one size and without `gate_bias`).
    """

    compress: int = checked(32, require_whole, ge=1)
    stride: int = checked(16, require_whole, ge=1)
    select: int = checked(64, require_whole, ge=1)
    top: int = checked(16, require_whole, ge=1)
    window: int = checked(512, require_whole, ge=1)
    compression: str = checked("mlp", require_choice, ("mlp", "mean"))
    gate_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compress", "select"):
            if getattr(self, name) % self.stride:
                raise InvalidValue.of(name, getattr(self, name), f"a multiple of the stride {self.stride}")

    @property
    def products(self) -> int:
        """The number of weights that multiply a block of one key head and of one value head."""
        heads = self.head_layout
        return (self.compress + 1) * (heads.key_size**2 + heads.value_size**2) if self.compression == "mlp" else 0

    def compressed(self, keys: int) -> int:
        """The number of compressed blocks that start within `keys` keys."""
        return -(-keys // self.stride)

    def compressed_seen(self, shape: Shape | Step) -> int:
        """The number of pairs of a query and a compressed block that ends at or before it, for one head."""
        return shape.batch * (self._compressed_upto(shape.key) - self._compressed_upto(shape.key - shape.query))

    def _compressed_upto(self, tokens: int) -> int:
        whole, rest = divmod(max(0, tokens - self.compress + 1), self.stride)
        return self.stride * whole * (whole + 1) // 2 + rest * (whole + 1)
