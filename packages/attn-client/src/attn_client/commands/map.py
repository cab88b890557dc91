"""`attn map`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from attn_schema import ConnectionOptions, Prompt
from attn_schema.flags import with_flags
from attn_schema.output import print_json

from attn_client.commands.options import Json, connect

Option = typer.Option


@with_flags
def map_command(  # noqa: PLR0913 - a command has the options it has  # noqa: PLR0913 - a command has the options it has
    *,
    model: Annotated[str, typer.Argument(help="Name of a served model.")],
    text: Annotated[str, typer.Argument(help="Sentence to look at; - reads standard input.")],
    encoder_prompt: Annotated[
        str | None, Option(help="What the encoder of an encoder-decoder model reads; the sentence is its output.")
    ] = None,
    layer: Annotated[int, Option(help="Layer, counted from 0.", min=0)] = 0,
    head: Annotated[list[int] | None, Option(help="Head, counted from 0; may be repeated. All by default.")] = None,
    out: Annotated[Path, Option("--out", "-o", help="PNG file to write.")] = Path("attention.png"),
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Draw the attention weights of a sentence: a grid of heads, queries down, keys across.

    Needs matplotlib: `pip install "attn-client[draw]"`. With `--json`, prints the weights and draws nothing.

    Example: `attn map smollm2-135m-instruct "The cat sat on the mat because it was tired." --layer 12`
    """
    sentence = Prompt.of(sys.stdin.read() if text == "-" else text, encoder_prompt)
    with connect(connection) as client:
        (drawn,) = client.attention_maps(model, sentence, layers=[layer], heads=head or ())
    if json:
        print_json(
            {
                "layer": drawn.layer,
                "mechanism": drawn.mechanism,
                "heads": drawn.heads,
                "query_tokens": drawn.query_tokens,
                "key_tokens": drawn.key_tokens,
                "attention_weights": drawn.attention_weights.view().tolist(),
            }
        )
        return
    from attn_client.drawing import draw

    draw(drawn, f"{model}, layer {drawn.layer}, {drawn.mechanism}", out)
    typer.echo(f"{len(drawn.heads)} heads of layer {drawn.layer}: {out.resolve()}")
