"""`attn embed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions, DeviceConfig, EngineConfig
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json
from attn_schema.text_files import lines_of_input

from attn_cli.commands.options import connect, here, refuse_options_of_the_other

SHOWN = 60
WORDS_HELP = "Name of a server's encoder unless --model is given, then texts; - reads them, one a line."


@with_flags
def embed_command(
    *,
    words: Annotated[list[str], typer.Argument(metavar="[SERVED] TEXT...", help=WORDS_HELP)],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Encoder to run on this machine: a pulled one, or a folder.")
    ] = None,
    json: Json = False,
    engine: DeviceConfig,
    connection: ConnectionOptions,
) -> None:
    """Embed texts and print the cosine similarity of each pair (1 is the same meaning); with `--json`, the vectors.

    The encoder is a server's, or with `--model` one that runs on this machine. Examples: `attn pull minilm`, then `attn
    embed --model minilm "a cat" "a kitten" "the tax return"`, or `attn embed minilm ...` while `attn serve --model
    minilm` runs. Device and element type apply only to an encoder that runs on this machine.
    """
    name, texts = (words[0], words[1:]) if model is None else (model, words)
    given = [line for text in texts for line in (lines_of_input() if text == "-" else [text]) if line]
    if not given:
        first = "a server's encoder, or --model, and " if model is None else ""
        raise InvalidValue.of("texts", " ".join(words), f"{first}at least one text that is not empty")
    refuse_options_of_the_other(local=model is not None, connection=connection, engine=engine)
    vectors: Sequence[tuple[float, ...]]
    if model is None:
        with connect(connection) as server:
            vectors = server.embed(name, given)
    else:
        with here(EngineConfig(dtype=engine.dtype, device=engine.device)) as local:
            vectors = local.embed(name, given)
    if json:
        print_json([{"text": text, "embedding": vector} for text, vector in zip(given, vectors, strict=True)])
        return
    for number, (text, vector) in enumerate(zip(given, vectors, strict=True), start=1):
        similarity = " ".join(f"{_cosine(vector, other):6.3f}" for other in vectors[:number])
        typer.echo(f"{number:>3}  {similarity}  {text[:SHOWN]}")


def _cosine(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The cosine similarity of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))
