"""`attn show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core import Mechanism, MechanismConfig, WholeCall, installed, parse_options
from attn_core.dtype import dtype_name
from attn_core.errors import Incompatible

from attn_cli.facts import describe, price, verdicts, weights_statement
from attn_cli.options import (
    Bidirectional,
    Dtype,
    HeadCount,
    HeadSize,
    KeyValueHeads,
    Options,
    Sizes,
    Width,
    fitting,
)
from attn_cli.output import Json, human_bytes, human_count, print_facts, print_json
from attn_cli.pictures import as_text, draw_grid, grid_of

PICTURE = 12
"""Positions on a side of the picture in text."""
DRAWN = 48
"""Positions on a side of the picture in a file."""


def show_command(
    name: Annotated[str, typer.Argument(help="A mechanism; `attn list mechanisms` names them.")],
    width: Width = 512,
    heads: HeadCount = 8,
    kv_heads: KeyValueHeads = None,
    head_size: HeadSize = None,
    bidirectional: Bidirectional = False,
    seq: Annotated[int, typer.Option(min=1, help="Tokens to price.")] = 1024,
    dtype: Dtype = "float32",
    option: Options = None,
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw its picture: PNG, SVG or PDF.")] = None,
    json: Json = False,
) -> None:
    """Show a mechanism: what it is, what it remembers, what it costs, which kernels compute it.

    Sizes are of one layer. The picture has a row per query and a column per key: the mask, or, for a mechanism that
    computes its own way, the mean weights of its heads on a random sample.
    """
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    config = fitting(sizes, mechanism).config(mechanism, parse_options(option))
    if draw is not None:
        draw_to(draw, mechanism, config)
    kernels = verdicts(mechanism, config, WholeCall(dtype=dtype_name(dtype), tokens=seq))
    facts = describe(mechanism) | price(mechanism, config, seq, dtype)
    facts |= {"weights": weights_statement(mechanism), "kernels": kernels}
    if json:
        print_json(facts)
        return
    drawn = grid_of(mechanism, config, PICTURE)
    print_facts(readable(facts) | ({drawn[0]: as_text(drawn[1])} if drawn else {}))


def draw_to(path: Path, mechanism: Mechanism, config: MechanismConfig) -> None:
    """Draw the picture; raises `Incompatible` for a mechanism with neither a mask nor weights."""
    drawn = grid_of(mechanism, config, DRAWN)
    if drawn is None:
        raise Incompatible(
            f"mechanism {mechanism.name!r} has neither a mask nor attention weights to draw", mechanism=mechanism.name
        )
    draw_grid(drawn[1], f"{mechanism.name}: {drawn[0]}", path)


def readable(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts as people read them."""
    said = dict(facts)
    for key in ("state bytes per token", "state bytes"):
        said[key] = human_bytes(facts[key])
    for key in ("flops", "allowed flops", "parameters"):
        said[key] = human_count(facts[key])
    for key in ("capabilities", "states"):
        said[key] = ", ".join(facts[key]) or "none"
    said["options"] = ", ".join(f"{name}={value}" for name, value in facts["options"].items()) or "none"
    lines = [f"{row['part']}: {row['name']} {row['verdict']} {row['reasons']}".strip() for row in facts["kernels"]]
    said["kernels"] = "\n".join(lines)
    return said
