"""Neighbourhood attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, Mask, MechanismConfig, Paper
from attn_core.errors import InvalidValue
from attn_core.masks import Neighbourhood, NeighbourhoodGrid

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import ENCODER, never_causal, whole_numbers


class NeighborhoodAttention(DeclaredMechanism):
    """Every query sees its k nearest positions; at the edges the neighbourhood is shifted, never cut.

    In one dimension, where of sequences shorter than k tokens all is seen, or in a plane whose cells the sequence fills
    row by row.
    """

    name = "neighborhood"
    summary = "always the k nearest positions, also at the edges"
    paper = Paper(title="Neighborhood Attention Transformer", authors="Hassani et al.", year=2023, arxiv="2204.07143")
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{\rho(i)}^\top}{\sqrt{d_k}}\right) V_{\rho(i)},\quad"
        r" \rho(i) = \{s, \dots, s + k - 1\},\quad s = \min(\max(i - \lfloor k/2 \rfloor, 0), n - k)"
    )
    sketch: ClassVar = {"size": 5}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`size` k of the neighbourhood; `dilation` between its positions, 1 for none (Hassani and Shi 2022).

        `grid` is None or (rows, columns) of a plane, in which a neighbourhood has k² cells.
        """

        size: int = 127
        dilation: int = 1
        grid: tuple[int, ...] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("size", self.size, "tokens")
            check_whole("dilation", self.dilation, "tokens")
            if self.grid is not None:
                object.__setattr__(self, "grid", whole_numbers("grid", self.grid, 1))
                if len(self.grid) != 2:
                    raise InvalidValue.of("grid", self.grid, "two numbers: rows and columns")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should be causal, `InvalidValue` where heads do not divide."""
        never_causal(self.name, config)
        options = self.Config.of(config)
        mask: Mask = Neighbourhood(size=options.size, dilation=options.dilation)
        if options.grid is not None:
            rows, columns = options.grid
            mask = NeighbourhoodGrid(size=options.size, dilation=options.dilation, rows=rows, columns=columns)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
