"""Sizes of multi-head latent attention, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import (
    AttentionSpec,
    Heads,
    Mask,
    Rotary,
)
from attn_core.scores import ScaledDot


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes in elements, as DeepSeek-V2 names them: `latent` d_c, `rotated` d_R, `nope` and `value` of one head.

    `query_latent` is the queries' own latent, None where queries come straight from the inputs. Scores are
    `score_factor` q·k / √(nope + rotated).
    """

    num_heads: int
    latent: int
    query_latent: int | None
    rotated: int
    nope: int
    value: int
    score_factor: float = 1.0

    @property
    def key(self) -> int:
        """Elements of a head's query or expanded key: those without positions, then those with."""
        return self.nope + self.rotated

    @property
    def remembered(self) -> int:
        """Elements remembered per token: latent and rotary key."""
        return self.latent + self.rotated

    @property
    def scale(self) -> float:
        """What q·k is multiplied by."""
        return self.score_factor * float(self.key**-0.5)

    def expanded(self, mask: Mask) -> AttentionSpec:
        """Multi-head attention over expanded keys and values."""
        heads = Heads(query=self.num_heads, key_value=self.num_heads, key_size=self.key, value_size=self.value)
        return AttentionSpec(heads=heads, mask=mask, score=ScaledDot(scale=self.scale))

    def absorbed(self, mask: Mask) -> AttentionSpec:
        """Multi-query attention over the remembered rows themselves, whose scores are those of the expanded keys."""
        heads = Heads(query=self.num_heads, key_value=1, key_size=self.remembered, value_size=self.latent)
        return AttentionSpec(heads=heads, mask=mask, score=ScaledDot(scale=self.scale))


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """What a layer of multi-head latent attention is built of; `norm_eps` is of both RMSNorms, `dropout` of weights."""

    hidden_size: int
    sizes: LatentSizes
    mask: Mask
    rotary: Rotary
    bias: bool
    norm_eps: float
    dropout: float = 0.0
