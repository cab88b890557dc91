"""`attn map`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions, DeviceConfig, EngineConfig, Prompt
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json
from attn_schema.text_client import TextClient

from attn_cli.commands.options import ModelHere, connect, here, refuse_options_of_the_other
from attn_cli.pages import AttentionPage

Option = typer.Option
WORDS_HELP = "Name of a server's model unless --model is given, then the sentence to look at; - reads standard input."


@with_flags
def map_command(
    *,
    words: Annotated[list[str], typer.Argument(metavar="[SERVED] TEXT", help=WORDS_HELP)],
    model: ModelHere = None,
    encoder_prompt: Annotated[
        str | None, Option(help="What the encoder of an encoder-decoder model reads; the sentence is its output.")
    ] = None,
    layer: Annotated[int | None, Option(help="Layer, counted from 0; by default 0, with --html all.", min=0)] = None,
    head: Annotated[list[int] | None, Option(help="Head, counted from 0; may be repeated. All by default.")] = None,
    out: Annotated[Path, Option("--out", "-o", help="PNG file to write.")] = Path("attention.png"),
    html: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the attention explorer as one HTML file, not a picture."),
    ] = None,
    compare: Annotated[
        str | None, Option(metavar="MODEL", help="Another model on the same sentence, beside the first; with --html.")
    ] = None,
    gradients: Annotated[
        bool, Option("--gradients", help="Also show how much the next token depends on each token; with --html.")
    ] = False,
    json: Json = False,
    engine: DeviceConfig,
    connection: ConnectionOptions,
) -> None:
    """Draw the attention weights of a sentence: one heat map for each head, queries down, keys across.

    Needs matplotlib: `pip install "attn-cli[draw]"`. With `--json`, prints the weights and draws nothing.

    With `--html FILE`, writes the attention explorer instead: layers by heads, lines, matrix, rollout, in one file that
    needs no server and no network.

    The model is a server's, or with `--model` one that runs on this machine; device and element type apply to the
    latter.

    Example: `attn map smollm2-135m-instruct "The cat sat on the mat because it was tired." --layer 12`
    """
    name, text = _asked(words, model)
    if html is None and (compare is not None or gradients):
        raise InvalidValue.of("--compare, --gradients", compare or gradients, "only beside --html FILE")
    if html is not None and json:
        raise InvalidValue.of("--json", json, "not beside --html")
    sentence = Prompt.of(sys.stdin.read() if text == "-" else text, encoder_prompt)
    refuse_options_of_the_other(local=model is not None, connection=connection, engine=engine)
    with ExitStack() as stack:
        options = EngineConfig(dtype=engine.dtype, device=engine.device)
        client: TextClient = stack.enter_context(connect(connection) if model is None else here(options))
        if html is not None:
            layers = () if layer is None else (layer,)
            named = [name, *([compare] if compare is not None else [])]
            views = [
                (each, client.attention_maps(each, sentence, layers=layers, heads=head or (), gradients=gradients))
                for each in named
            ]
            written = AttentionPage(views).save(html)
            typer.echo(f"{written.resolve()} ({written.stat().st_size / 1e6:.1f} MB)")
            return
        (drawn,) = client.attention_maps(name, sentence, layers=[layer or 0], heads=head or ())
    if json:
        print_json(
            {
                "layer": drawn.layer,
                "mechanism": drawn.mechanism,
                "heads": drawn.heads,
                "cross_attention": drawn.cross_attention,
                "query_tokens": drawn.query_tokens,
                "key_tokens": drawn.key_tokens,
                "attention_weights": drawn.attention_weights.view().tolist(),
            }
        )
        return
    from attn_schema.drawing import draw

    draw(drawn, name, out)
    typer.echo(f"{len(drawn.heads)} heads of layer {drawn.layer}: {out.resolve()}")


def _asked(words: list[str], model: str | None) -> tuple[str, str]:
    given = ([model] if model is not None else []) + words
    if len(given) != 2:
        allowed = "a server's model and a sentence, or --model and a sentence"
        raise InvalidValue.of("arguments", " ".join(words), allowed)
    return given[0], given[1]
