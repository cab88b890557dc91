"""Sizes of multi-head latent attention, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import (
    AttentionSpec,
    Heads,
    Mask,
    MechanismConfig,
    Rotary,
)
from attn_core.scores import ScaledDot


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes in elements for the heads of `config`, as DeepSeek-V2 names them: `latent` d_c, `rotated` d_R, `nope` and
    `value` of one head.

    `query_latent` is the size of the queries' own latent, None if queries are projected directly from the inputs.
    Scores are `score_factor` q·k / √(nope + rotated).
    """

    config: MechanismConfig
    latent: int
    query_latent: int | None
    rotated: int
    nope: int
    value: int
    score_factor: float = 1.0

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.config.num_heads

    @property
    def key(self) -> int:
        """The size of a query or expanded key of a head: first the part without positions, then the rotary part."""
        return self.nope + self.rotated

    @property
    def remembered(self) -> int:
        """The number of elements cached per token: latent and rotary key."""
        return self.latent + self.rotated

    @property
    def scale(self) -> float:
        """The factor of q·k."""
        return self.score_factor * float(self.key**-0.5)

    def expanded(self, mask: Mask) -> AttentionSpec:
        """The spec of multi-head attention over expanded keys and values."""
        heads = Heads(query=self.heads, key_value=self.heads, key_size=self.key, value_size=self.value)
        return AttentionSpec(heads=heads, mask=mask, score=ScaledDot(scale=self.scale))

    def absorbed(self, mask: Mask) -> AttentionSpec:
        """The spec of multi-query attention over the cached rows, with the same scores as the expanded keys."""
        heads = Heads(query=self.heads, key_value=1, key_size=self.remembered, value_size=self.latent)
        return AttentionSpec(heads=heads, mask=mask, score=ScaledDot(scale=self.scale))


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The options of a `LatentAttentionLayer`; `norm_eps` is that of both RMSNorms."""

    sizes: LatentSizes
    mask: Mask
    rotary: Rotary | None
    norm_eps: float
