"""`attn show`."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Annotated, Any

import typer
from attn_core import Mask, Mechanism, MechanismConfig, Shape, installed, option_fields, state_bytes

from attn_cli.options import (
    Bidirectional,
    Dtype,
    HeadCount,
    HeadSize,
    KeyValueHeads,
    Options,
    Sizes,
    Width,
    parse_options,
)
from attn_cli.output import Json, human_bytes, human_count, print_facts, print_json

PICTURE = 12
"""Positions on a side of the picture of a mask."""


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
    json: Json = False,
) -> None:
    """Show a mechanism: what it is, what it remembers and what it costs.

    Sizes are of one layer. The picture of a mask has a row per query and a column per key; `■` is seen.
    """
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    config = sizes.config(mechanism, parse_options(option))
    facts = describe(mechanism) | price(mechanism, config, seq, dtype)
    if json:
        print_json(facts)
        return
    readable = dict(facts)
    for key in ("state bytes per token", "state bytes"):
        readable[key] = human_bytes(facts[key])
    for key in ("flops", "allowed flops", "parameters"):
        readable[key] = human_count(facts[key])
    for key in ("capabilities", "states"):
        readable[key] = ", ".join(facts[key]) or "none"
    readable["options"] = ", ".join(f"{name}={value}" for name, value in facts["options"].items()) or "none"
    spec = mechanism.spec(config)
    if spec is not None:
        readable["mask"] = picture(spec.mask)
    print_facts(readable)


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """What the mechanism says of itself."""
    paper = mechanism.paper
    options = {
        name: "required" if default is MISSING else default for name, default in option_fields(mechanism).items()
    }
    return {
        "name": mechanism.name,
        "summary": mechanism.summary,
        "package": installed().mechanisms.owner(mechanism.name),
        "paper": f"{paper.authors} ({paper.year}). {paper.title}. {paper.url or ''}".strip(),
        "equation": mechanism.equation,
        "capabilities": sorted(mechanism.capabilities),
        "options": options,
    }


def price(mechanism: Mechanism, config: MechanismConfig, tokens: int, dtype: str) -> dict[str, Any]:
    """What one layer remembers and costs for one sequence of `tokens` tokens."""
    states = mechanism.state(config)
    cost = mechanism.cost(config, Shape(batch=1, query=tokens, key=tokens))
    grown = state_bytes(states, tokens=tokens, source=tokens, dtype=dtype)
    shorter = state_bytes(states, tokens=tokens - 1, source=tokens - 1, dtype=dtype)
    return {
        "states": [f"{name}: {type(spec).__name__.lower()} {dict(spec.fields)}" for name, spec in states.items()],
        "tokens": tokens,
        "dtype": dtype,
        "state bytes": grown,
        "state bytes per token": grown - shorter,
        "flops": cost.flops,
        "allowed flops": cost.allowed_flops,
        "parameters": cost.parameters,
    }


def picture(mask: Mask, positions: int = PICTURE) -> str:
    """The mask over the first positions, a line per query."""
    return "\n".join(
        " ".join("■" if mask.allows(query, key) else "·" for key in range(positions)) for query in range(positions)
    )
