"""What the programs of linear recurrences are given; see `programs.arguments`.

C tokens of a chunk meet pair by pair; K and V are the sizes of keys and values. A memory S [K, V] of a head becomes
S' = e^γ S + k̂ᵀ N, and is read as o = P N + q̃ S: P are the products of queries and earlier keys, which fade between
them, q̃ queries times what is left at their token, k̂ keys times what will be left at the end, γ what fades over the
chunk. N is what is written: the values, or by the delta rule β E with E = X - Y S.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_kernels_triton.kernels.arguments import Rows


class ScanTile(NamedTuple):
    """Constants: tokens of a chunk and the rounds in which it doubles from one; sizes, as they are and as powers of
    two; how many channels of keys and of values are taken at once, and how often; whether channels fade apart; and
    whether float32 is multiplied in parts, see `rows.product`."""

    chunk: Any
    rounds: Any
    key_size: Any
    value_size: Any
    key_width: Any
    keys_at_once: Any
    values_at_once: Any
    key_parts: Any
    value_parts: Any
    channels: Any
    split: Any


class Scan(NamedTuple):
    """Everything for the forward programs; a row is a token but where it is said.

    `faded` [..., K or 1], float32, are sums of log decays from the start of the chunk, to the base 2; `strength` β
    [..., 1]. By the delta rule `solved` is X [..., V], `told` Y [..., K], `inverse` (I + βB)^-1 [..., C] with the
    products B of keys, and `news` E [..., V]; else `news` are the values and the others `NO_ROWS`. `states` [batch,
    chunk · K, head, V] are S before every chunk, `before` and `after` [batch, K, head, V] the first S, `NO_ROWS` for
    an empty one, and the last.
    """

    query: Rows
    key: Rows
    value: Rows
    faded: Rows
    strength: Rows
    solved: Rows
    told: Rows
    inverse: Rows
    news: Rows
    states: Rows
    before: Rows
    after: Rows
    out: Rows
    heads: Any
    tokens: Any
    tile: ScanTile


class Unscan(NamedTuple):
    """Everything for the backward programs: a forward one, gradients that are given, and those that are written.

    `out` to the output, `after` to the last memory, `NO_ROWS` for none; `states` to S after every chunk, `news` to N;
    `decay` [..., K or parts of K] to log decays, `NO_ROWS` where nobody asks.
    """

    scan: Scan
    out: Rows
    after: Rows
    states: Rows
    news: Rows
    before: Rows
    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    strength: Rows


class Fade(NamedTuple):
    """Everything for the program that sums log decays; `channels` of a row are taken at once."""

    decay: Rows
    faded: Rows
    heads: Any
    tokens: Any
    chunk: Any
    size: Any
    channels: Any


class Decode(NamedTuple):
    """Everything for the program that goes token by token, its memory never leaving registers; as of `Scan`."""

    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    strength: Rows
    before: Rows
    after: Rows
    out: Rows
    heads: Any
    tokens: Any
    tile: ScanTile
