"""The options of DeepSeek sparse attention over latents, and the sizes that follow from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_core import AttentionSpec, Causal, Heads
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.scores import ScaledDot

from attn_sparse.dsa.options import DsaConfig


@dataclass(frozen=True, kw_only=True)
class SparseMlaConfig(DsaConfig):
    """The options of `dsa`, and the sizes of latent attention as in `mla`, here with a latent of the queries always.

    `latent` and `query_latent` are the sizes of the latents of a token's keys and values, and of its queries;
    `rotary_size` that of the rotary key, and of the rotated part of index heads; `nope_size` and `value_size` of one
    head are `head_dim` if they are None. `norm_eps` is that of the latents' norms; scores are multiplied by
    `score_factor`.

    With a `pool` the indexer scores pools of so many tokens, whose index keys a learned softmax mixes element by
    element. A query attends to the tokens of the best pools among those that are complete, `top` tokens in all, and to
    those of the incomplete one.
    """

    index_size: int = 128
    latent: int = checked(512, require_whole, ge=1, unit="elements")
    query_latent: int = checked(1536, require_whole, ge=1, unit="elements")
    rotary_size: int = checked(64, require_whole, ge=0, unit="elements")
    nope_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
    value_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
    norm_eps: float = checked(1e-6, require_number, gt=0)
    score_factor: float = checked(1.0, require_number, gt=0)
    pool: int | None = checked(None, require_whole, ge=2, unit="tokens", optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool is not None and self.top % self.pool:
            raise InvalidValue.of("top", self.top, f"a multiple of the {self.pool} tokens of a pool")
        if self.rotary_size % 2:
            raise InvalidValue.of("rotary_size", self.rotary_size, "an even number, as elements are rotated in pairs")
        if self.rotary_size > self.index_size:
            raise InvalidValue.of("rotary_size", self.rotary_size, f"at most the index_size {self.index_size}")

    @property
    def query_width(self) -> int:
        """The size of the queries' latent, from which index queries are computed."""
        return self.query_latent

    @property
    def every(self) -> int:
        """The number of tokens for each index key."""
        return self.pool or 1

    @property
    def turned(self) -> int:
        """The number of elements of an index head that rotary positions are applied to: as many as of a key."""
        return 0 if self.rotary is None else self.rotary_size

    @property
    def nope(self) -> int:
        """The number of elements of a head's key without positions."""
        return self.nope_size or self.head_layout.key_size

    @property
    def value(self) -> int:
        """The number of elements of a head's value."""
        return self.value_size or self.head_layout.value_size

    @property
    def key(self) -> int:
        """The number of elements of a head's query or key: without positions first, then the rotary part."""
        return self.nope + self.rotary_size

    @property
    def expanded(self) -> AttentionSpec:
        """Attention over the keys and values of every head, expanded from the latents."""
        return self._spec(
            Heads(query=self.num_heads, key_value=self.num_heads, key_size=self.key, value_size=self.value)
        )

    @property
    def scaled(self) -> AttentionSpec:
        """`expanded` for queries which are scaled already."""
        return dataclasses.replace(self.expanded, score=ScaledDot(scale=1.0))

    @property
    def absorbed_scaled(self) -> AttentionSpec:
        """`absorbed` for queries which are scaled already."""
        return dataclasses.replace(self.absorbed, score=ScaledDot(scale=1.0))

    @property
    def absorbed(self) -> AttentionSpec:
        """The same attention over the cached rows, which all heads share: latents and rotary keys."""
        row = self.latent + self.rotary_size
        return self._spec(Heads(query=self.num_heads, key_value=1, key_size=row, value_size=self.latent))

    def _spec(self, heads: Heads) -> AttentionSpec:
        return AttentionSpec(heads=heads, mask=Causal(), score=ScaledDot(scale=self.score_factor * self.key**-0.5))
