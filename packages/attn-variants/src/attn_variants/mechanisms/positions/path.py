"""PaTH attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Computation,
    Cost,
    DeclaredMechanism,
    Field,
    MechanismConfig,
    Paper,
    Shape,
)

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.positions.placed import refuse_rotary
from attn_variants.mechanisms.sparse.common import only_causal

if TYPE_CHECKING:
    from attn_variants.places.path import Reflections


class PathAttention(DeclaredMechanism):
    """A query is turned by one reflection for every token between it and the key, each of the token's own making.

    What rotary positions do by the distance alone, the data does here; the state of things can be tracked.
    """

    name = "path"
    summary = "queries are reflected by every token on the way to the key"
    paper = Paper(
        title="PaTH Attention: Position Encoding via Accumulating Householder Transformations",
        authors="Yang et al.",
        year=2025,
        arxiv="2505.16381",
    )
    equation = (
        r"\alpha_{ij} \propto \exp\left(\frac{q_i^\top H_i H_{i-1} \cdots H_{j+1} k_j}{\sqrt{d_k}}\right),\quad"
        r" H_t = I - \beta_t w_t w_t^\top,\quad \lVert w_t \rVert = 1,\quad \beta_t = 2\,\sigma(u^\top x_t + b)"
    )
    capabilities = GROUPED_SELF - {Capability.BIDIRECTIONAL, Capability.ROTARY, Capability.BORROWS}
    sequential = True

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` of the map to directions w; `taps`, tokens of the short convolution over them; `block` tokens are
        passed at once, which changes the speed only."""

        rank: int = 32
        taps: int = 3
        block: int = 32

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("rank", self.rank, "elements")
            check_whole("taps", self.taps, "tokens")
            check_whole("block", self.block, "tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should look ahead or turn positions, `InvalidValue` where heads do not
        divide."""
        only_causal(self.name, config)
        refuse_rotary(self.name, config)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))

    def inner(self, config: MechanismConfig) -> Reflections:
        """The reflections, with random weights."""
        from attn_variants.places.path import Reflections

        own = self.Config.of(config)
        return Reflections(self.spec(config), width=config.width, rank=own.rank, taps=own.taps, block=own.block)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """Its own module: every query's keys are turned on the way to it, which no kernel does."""
        return (Computation(),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """A direction and, in float32 because hundreds of reflections follow one another, a strength."""
        heads = config.head_layout
        return {
            "direction": Field((heads.key_value, heads.key_size)),
            "strength": Field((heads.key_value,), dtype="float32"),
        }

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections and pairs as declared; the directions of new tokens; and the reflections: products among the
        tokens of a block, and of every query with all of a block's."""
        own, heads = self.Config.of(config), config.head_layout
        size, block = heads.key_size, own.block
        into = heads.key_value * size
        projected = 2 * shape.query * (config.width * (own.rank + heads.key_value) + own.rank * into)
        tokens = -(-shape.key // block) * block
        among = 4 * heads.key_value * size * block
        passing = 2 * heads.query * (2 * size + block)
        padding = 2 * heads.query * size * (tokens - shape.key)
        seen = self.spec(config).mask.count(shape.query, shape.key)
        turned = Cost(
            flops=shape.batch * (projected + tokens * (among + shape.query * passing) + shape.query * padding),
            allowed_flops=shape.batch * (projected + shape.key * among + seen * passing),
            parameters=own.rank * (config.width + into) + into * own.taps + (config.width + 1) * heads.key_value,
        )
        return super().cost(config, shape) + turned
