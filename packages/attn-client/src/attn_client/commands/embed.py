"""`attn embed`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from attn_core.errors import InvalidValue

from attn_client.commands.options import Json, print_line
from attn_client.commands.place import here

MODEL = "minilm"
SHOWN = 60


def embed_command(
    *,
    texts: Annotated[list[str], typer.Argument(help="Texts; - reads them from standard input, one a line.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Encoder to run here: a pulled one, or a folder.")
    ] = MODEL,
    json: Json = False,
) -> None:
    """Turn texts into vectors, without a server, and show how near they are in meaning (1 is the same).

    Examples: `attn pull minilm`, then `attn embed "a cat" "a kitten" "the tax return"`; with `--json` the vectors
    themselves, one a line.
    """
    given = [line for text in texts for line in (sys.stdin.read().splitlines() if text == "-" else [text]) if line]
    if not given:
        raise InvalidValue.of("texts", texts, "at least one text that is not empty")
    with here() as local:
        vectors = local.embed(model, given)
    if json:
        for text, vector in zip(given, vectors, strict=True):
            print_line({"text": text, "embedding": vector})
        return
    for number, (text, vector) in enumerate(zip(given, vectors, strict=True), start=1):
        near = " ".join(f"{_cosine(vector, other):6.3f}" for other in vectors[:number])
        typer.echo(f"{number:>3}  {near}  {text[:SHOWN]}")


def _cosine(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Of vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))
