"""`attn explain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from attn_core import installed
from attn_core.computation import WholeCall
from attn_core.errors import Incompatible, InvalidValue
from attn_core.kernels.rowwise import ROW_FORMS
from attn_core.options import parse_options
from attn_core.states import dtype_name

from attn_cli.facts import paged_verdicts, verdicts
from attn_cli.options import (
    Bidirectional,
    Dtype,
    HeadCount,
    HeadSize,
    KeyValueHeads,
    Options,
    Sizes,
    Width,
)
from attn_cli.output import Json, print_json
from attn_cli.rowwise import rowwise_verdicts
from attn_cli.tables import print_table


def explain_command(
    name: Annotated[
        str,
        typer.Argument(
            help=f"A mechanism, as of `attn list mechanisms`, or an operation on rows: {', '.join(ROW_FORMS)}."
        ),
    ],
    width: Width = 512,
    heads: HeadCount = 8,
    kv_heads: KeyValueHeads = None,
    head_size: HeadSize = None,
    bidirectional: Bidirectional = False,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    training: Annotated[bool, typer.Option("--training", help="Gradients are needed.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="Sequences of different lengths.")] = False,
    varlen: Annotated[bool, typer.Option("--packed", help="Texts laid end to end, without padding.")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Attention weights are dropped at random.")] = False,
    rows: Annotated[
        str | None,
        typer.Option(help="A step of serving over rows where a cache keeps them: plain, int8, int4, latent."),
    ] = None,
    form: Annotated[str | None, typer.Option(help="The form of an operation on rows, such as added or pairs.")] = None,
    option: Options = None,
    json: Json = False,
) -> None:
    """Say which kernel computes a mechanism here, and why each of the others refuses.

    The accepting kernel of least predicted cost runs; cost is a share of the plain computation's time. What the
    mechanism's own module computes, wholly or in part, asks no kernel and says so.
    """
    if name in ROW_FORMS:
        known = {"dtype": dtype_name(dtype), "device": device, "gradients": training}
        show(rowwise_verdicts(name, width, form=form, **known), json=json)
        return
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(width=width, heads=heads, key_value_heads=kv_heads, head_size=head_size, causal=not bidirectional)
    config = sizes.config(mechanism, parse_options(option))
    call = WholeCall(
        dtype=dtype_name(dtype),
        device=device,
        gradients=training,
        padded=padded,
        varlen=varlen,
        dropout=dropout or (training and config.dropout > 0),
        tokens=seq,
    )
    if rows is None:
        found = verdicts(mechanism, config, call)
        if varlen and all(row["verdict"] != "runs" for row in found):
            typer.echo(
                "no kernel here takes packed texts together: each is computed alone, see without --packed", err=True
            )
    elif training or padded or varlen or dropout:
        allowed = "no --training, --padded, --packed or --dropout beside it: it is a step of serving"
        raise InvalidValue.of("--rows", rows, allowed)
    else:
        found = paged_verdicts(mechanism, config, dtype=dtype_name(dtype), device=device, rows=rows)
        if not found:
            message = f"the steps of mechanism {name!r} gather {rows} rows: no kernel is asked to meet them in place"
            raise Incompatible(message, mechanism=name)
    show(found, json=json)


def show(found: list[dict[str, Any]], *, json: bool) -> None:
    """The verdicts as a table or as JSON."""
    if json:
        print_json(found)
    else:
        print_table(found, "no kernel is installed; pip install attn-variants")
