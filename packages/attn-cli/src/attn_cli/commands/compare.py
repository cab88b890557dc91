"""`attn compare`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.states import dtype_name

from attn_cli.facts import price
from attn_cli.options import Bidirectional, Dtype, HeadCount, HeadSize, KeyValueHeads, Sizes, Width, fitting
from attn_cli.output import Json, human_bytes, human_count, print_json
from attn_cli.pictures import draw_curves
from attn_cli.tables import print_table

CURVES = {"allowed flops": "FLOPs of a forward pass", "state bytes": "bytes remembered"}
COUNTS = {"weights": "parameters", "flops": "flops", "allowed": "allowed flops"}
SIZES = {"state": "state bytes", "a token": "state bytes per token"}


def compare_command(
    names: Annotated[list[str], typer.Argument(help="Mechanisms; `attn list mechanisms` names them.")],
    seq: Annotated[str, typer.Option(metavar="N,N,...", help="Sequence lengths to price.")] = "1024,4096,16384",
    width: Width = 512,
    heads: HeadCount = 8,
    kv_heads: KeyValueHeads = None,
    head_size: HeadSize = None,
    bidirectional: Bidirectional = False,
    dtype: Dtype = "float32",
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the curves: PNG, SVG or PDF.")] = None,
    json: Json = False,
) -> None:
    """Compare what mechanisms cost and remember as sequences grow, one layer each, side by side.

    Example: `attn compare mha sliding_window linear --seq 1024,16384 --draw curves.png`. Key/value heads are given
    only to mechanisms that can share them; a mechanism without a causal form is priced bidirectional.
    """
    lengths = parse_lengths(seq)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    rows = priced(names, sizes, lengths, dtype_name(dtype))
    if draw is not None:
        dense = with_powers_of_two(lengths)
        draw_curves(curves(priced(names, sizes, dense, dtype_name(dtype))), dense, draw)
    if json:
        print_json(rows)
    else:
        print_table([readable(facts) for facts in rows], "no mechanism was named")


def priced(names: list[str], sizes: Sizes, lengths: list[int], dtype: str) -> list[dict[str, Any]]:
    """A row for each mechanism and length."""
    return [row(name, sizes, length, dtype) for name in dict.fromkeys(names) for length in lengths]


def row(name: str, sizes: Sizes, length: int, dtype: str) -> dict[str, Any]:
    """The price of one mechanism at one length."""
    mechanism = installed().mechanisms.get(name)
    fitted = fitting(sizes, mechanism)
    try:
        facts = price(mechanism, fitted.config(mechanism, {}), length, dtype)
    except InvalidValue as error:
        # Such as multi-query attention, which takes one key/value head and no other number.
        if fitted.key_value_heads is None or error.metadata.get("field") != "key_value_heads":
            raise
        own = dataclasses.replace(fitted, key_value_heads=None)
        facts = price(mechanism, own.config(mechanism, {}), length, dtype)
    kept = ("tokens", "parameters", "flops", "allowed flops", "state bytes", "state bytes per token")
    return {"name": name} | {key: facts[key] for key in kept}


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Title of a panel -> mechanism -> values by length."""
    panels: dict[str, dict[str, list[float]]] = {}
    for key, title in CURVES.items():
        for facts in rows:
            panels.setdefault(title, {}).setdefault(facts["name"], []).append(facts[key])
    return panels


def readable(facts: dict[str, Any]) -> dict[str, Any]:
    """The row as people read it, in a screen's width."""
    counted = {short: human_count(facts[key]) for short, key in COUNTS.items()}
    sized = {short: human_bytes(facts[key]) for short, key in SIZES.items()}
    return {"name": facts["name"], "tokens": facts["tokens"]} | counted | sized


def with_powers_of_two(lengths: list[int]) -> list[int]:
    """The lengths and the powers of two between them, so that a curve bends where its mechanism's price does."""
    powers = [2**power for power in range(lengths[0].bit_length(), lengths[-1].bit_length())]
    return sorted({*lengths, *(power for power in powers if power < lengths[-1])})


def parse_lengths(text: str) -> list[int]:
    """Ascending lengths of "1024,4096"; raises `InvalidValue`."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise InvalidValue.of("--seq", text, "whole numbers from 1, with commas between them")
    return lengths
