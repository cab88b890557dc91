"""`attn explain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from attn_core import Mechanism, MechanismConfig, attend_problem, explain, installed
from attn_core.dtype import dtype_name
from attn_core.errors import Incompatible

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
from attn_cli.output import Json, print_json, print_table


def explain_command(
    name: Annotated[str, typer.Argument(help="A mechanism; `attn list mechanisms` names them.")],
    width: Width = 512,
    heads: HeadCount = 8,
    kv_heads: KeyValueHeads = None,
    head_size: HeadSize = None,
    bidirectional: Bidirectional = False,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    training: Annotated[bool, typer.Option("--training", help="Gradients are needed.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="Sequences of different lengths.")] = False,
    option: Options = None,
    json: Json = False,
) -> None:
    """Say which kernel computes a mechanism here, and why each of the others refuses.

    The accepting kernel of least predicted cost runs; cost is a share of the plain computation's time.
    """
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    config = sizes.config(mechanism, parse_options(option))
    rows = verdicts(mechanism, config, dtype=dtype_name(dtype), device=device, gradients=training, padded=padded)
    if json:
        print_json(rows)
    else:
        print_table(rows, "no kernel is installed; pip install attn-variants")


def verdicts(mechanism: Mechanism, config: MechanismConfig, **problem: Any) -> list[dict[str, Any]]:
    """A row per kernel, the chosen one first."""
    spec = mechanism.spec(config)
    if spec is None:
        raise Incompatible(
            f"mechanism {mechanism.name!r} computes its own way; kernels are chosen for mechanisms that are a spec",
            mechanism=mechanism.name,
        )
    rows = []
    for place, verdict in enumerate(explain(installed().kernels, attend_problem(spec, **problem))):
        said = "refuses" if not verdict.accepted else "runs" if place == 0 else "would accept"
        cost = "" if verdict.cost is None else f"{verdict.cost:g}"
        rows.append({"name": verdict.kernel.name, "verdict": said, "cost": cost, "reasons": "; ".join(verdict.reasons)})
    return rows
