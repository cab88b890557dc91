"""`attn show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core import installed
from attn_core.computation import WholeCall
from attn_core.options import parse_options
from attn_core.states import dtype_name

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
from attn_cli.pictures import as_text, draw_grid
from attn_cli.views import view_of

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
    chooses what it sees or computes its own way, what a layer with random weights does with a random input, the same
    every time. Where no option is given it is drawn at options that show the mechanism among few tokens.
    """
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    fitted, given = fitting(sizes, mechanism), parse_options(option)
    config, shown = fitted.config(mechanism, given), given or dict(mechanism.sketch)
    sketched = fitted.config(mechanism, shown)
    if draw is not None:
        drawn = view_of(mechanism, sketched, DRAWN, shown)
        draw_grid(drawn.grid, f"{mechanism.name}: {drawn.caption}", draw)
    kernels = verdicts(mechanism, config, WholeCall(dtype=dtype_name(dtype), tokens=seq))
    facts = describe(mechanism) | price(mechanism, config, seq, dtype)
    facts |= {"weights": weights_statement(mechanism), "kernels": kernels}
    if json:
        print_json(facts)
        return
    view = view_of(mechanism, sketched, PICTURE, shown)
    print_facts(readable(facts) | {"picture": f"{view.caption}\n{as_text(view.grid)}"})


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
