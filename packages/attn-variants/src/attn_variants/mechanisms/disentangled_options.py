"""The options of disentangled attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class DisentangledConfig(MechanismConfig):
    """There are 2 · `buckets` vectors of relative positions: distances of each direction have one each up to half of
    the buckets, then share them in ranges that grow up to `max_distance`; without `buckets`, all distances below that
    have one each.

    `query_positions` and `key_positions` say whether queries are multiplied by positions (c2p), and keys (p2c); with
    `separate`, positions have projections of their own. With `norm_eps`, vectors are normalised (layer norm).
    """

    buckets: int | None = checked(256, require_whole, ge=4, unit="buckets", optional=True)
    max_distance: int = checked(512, require_whole, ge=1, unit="positions")
    query_positions: bool = True
    key_positions: bool = True
    separate: bool = False
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_eps is not None:
            require_number("norm_eps", self.norm_eps, ge=0)
        if not (self.query_positions or self.key_positions):
            raise InvalidValue.of("key_positions", self.key_positions, "True where query_positions is False")
        if self.buckets is not None and self.max_distance <= self.buckets // 2 + 1:
            allowed = f"more than {self.buckets // 2 + 1}, half of the buckets and one"
            raise InvalidValue.of("max_distance", self.max_distance, allowed)

    @property
    def span(self) -> int:
        """The number of vectors of each direction."""
        return self.buckets or self.max_distance

    @property
    def products(self) -> int:
        """The number of products that a score sums."""
        return 1 + self.query_positions + self.key_positions
