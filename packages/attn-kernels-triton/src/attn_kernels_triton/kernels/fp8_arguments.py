"""What the programs over e4m3 codes are given; see `arguments`."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_kernels_triton.kernels.arguments import NOTHING_DROPPED, Dropped, Places, Rows, Rule, Shape, Tile


class Codes(NamedTuple):
    """Everything for the program that makes codes of `rows`, so many in `count`, of `heads`.

    `rotation` [width, width], of the type of the rows, is what they are multiplied by, None where they stay as they
    are. `codes` [batch, head, row, width], or [batch, head, width, row] where they are `turned`, have rows for whole
    blocks; `scales` [batch, head, block], float32.
    """

    rows: Rows
    count: Any
    heads: Any
    rotation: Any
    codes: Any
    scales: Any
    size: Any
    width: Any
    turned: Any


class Coded(NamedTuple):
    """Everything for the program that meets codes; `lse` as of `Forward`, scales as of `Codes`."""

    query_scales: Any
    key_scales: Any
    value_scales: Any
    out: Rows
    lse: Any
    shape: Shape
    rule: Rule
    places: Places
    tile: Tile
    texts: Any = None
    dropout: Dropped = NOTHING_DROPPED
