"""The Reformer as an encoder (Kitaev et al. 2020, arXiv 2001.04451)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.checks import require_count
from attn_models.decoder.initial import STANDARD, initialise
from attn_models.encoder.block import ReversibleBlock
from attn_models.encoder.shape import EncoderShape


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(EncoderShape):
    """Reversible blocks over token and position embeddings.

    Where `axes` (rows, columns) are given, place p has the vector of row p // columns beside that of column
    p % columns, of `axis_widths` elements each; else every place of the `context` has a vector of its own. Raises
    `InvalidValue` for a field outside its range.
    """

    vocabulary: int
    context: int
    axes: tuple[int, int] | None = None
    axis_widths: tuple[int, int] | None = None
    norm_place: ClassVar[str] = "pre"
    attention_bias: ClassVar[bool] = False
    noun: ClassVar[str] = "a Reformer"
    pairs: ClassVar[tuple[str, ...]] = ("axes", "axis_widths")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes is None and self.axis_widths is None:
            return
        for name in self.pairs:
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidValue.of(name, pair, "two whole numbers, or neither axes nor axis_widths")
            for size in pair:
                require_count(name, size)
        if self.axes is not None and math.prod(self.axes) < self.context:
            raise InvalidValue.of("axes", self.axes, f"a product of at least the context of {self.context} tokens")
        if self.axis_widths is not None and sum(self.axis_widths) != self.width:
            raise InvalidValue.of("axis_widths", self.axis_widths, f"a sum of {self.width}, the width")

    @property
    def kinds(self) -> int:
        """Its tokens."""
        return self.vocabulary

    @property
    def places(self) -> int:
        """Its context."""
        return self.context


class AxialPositions(nn.Module):
    """Places of a grid, by a vector for each row and one for each column."""

    def __init__(self, axes: tuple[int, int], widths: tuple[int, int]) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(axes[0], 1, widths[0]))
        self.column = nn.Parameter(torch.empty(1, axes[1], widths[1]))
        for table in (self.row, self.column):
            nn.init.normal_(table, std=STANDARD)

    def forward(self, places: Tensor) -> Tensor:
        """Vectors [tokens, width] of places [tokens], int64."""
        columns = self.column.shape[1]
        return torch.cat([self.row[places // columns, 0], self.column[0, places % columns]], dim=-1)


class Reformer(nn.Module):
    """Two streams that begin alike, reversible blocks, and a norm of both side by side."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.size = 2 * config.width
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions: nn.Module = nn.Embedding(config.context, config.width)
        if config.axes is not None and config.axis_widths is not None:
            self.positions = AxialPositions(config.axes, config.axis_widths)
        self.blocks = nn.ModuleList(ReversibleBlock(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(self.size, eps=config.norm_eps)
        for module in (self.embedding, self.positions):
            initialise(module)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Rows [batch, tokens, 2 width] of token ids [batch, tokens], int64.

        `keep` [batch, tokens], bool, is True where a token is real. Raises `InvalidValue` for more tokens than the
        context.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.context} tokens")
        one = two = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            one, two = block(one, two, keep)
        rows: Tensor = self.norm(torch.cat([one, two], dim=-1))
        return rows
