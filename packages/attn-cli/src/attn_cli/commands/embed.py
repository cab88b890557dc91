"""`attn embed` and `attn score`, which compare texts: by their vectors, and by their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions, DeviceConfig, EngineConfig, Prompt, SequenceScore
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json, print_table
from attn_schema.text_files import lines_of_input

from attn_cli.commands.options import ModelHere, connect, here, refuse_options_of_the_other

SHOWN = 60
WORDS_HELP = "Name of a server's model unless --model is given, then texts; - reads them, one a line."
Words = Annotated[list[str], typer.Argument(metavar="[SERVED] TEXT...", help=WORDS_HELP)]


@with_flags
def embed_command(
    *,
    words: Words,
    model: ModelHere = None,
    json: Json = False,
    engine: DeviceConfig,
    connection: ConnectionOptions,
) -> None:
    """Embed texts and print the cosine similarity of each pair (1 is the same meaning); with `--json`, the vectors.

    The encoder is a server's, or with `--model` one that runs on this machine. Examples: `attn pull minilm`, then `attn
    embed --model minilm "a cat" "a kitten" "the tax return"`, or `attn embed minilm ...` while `attn serve --model
    minilm` runs. Device and element type apply only to an encoder that runs on this machine.
    """
    name, given = texts_of(words, model)
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


def texts_of(words: Sequence[str], model: str | None) -> tuple[str, list[str]]:
    """The name of the model, and the texts that are not empty; raises `InvalidValue` if there are none."""
    name, texts = (words[0], words[1:]) if model is None else (model, words)
    given = [line for text in texts for line in (lines_of_input() if text == "-" else [text]) if line]
    if not given:
        first = "a server's model, or --model, and " if model is None else ""
        raise InvalidValue.of("texts", " ".join(words), f"{first}at least one text that is not empty")
    return name, given


@with_flags
def score_command(
    *,
    words: Words,
    model: ModelHere = None,
    encoder_prompt: Annotated[
        str | None, typer.Option(help="What the encoder of an encoder-decoder model reads; the texts are its outputs.")
    ] = None,
    json: Json = False,
    engine: DeviceConfig,
    connection: ConnectionOptions,
) -> None:
    """Rank texts, such as several translations or continuations, by the probability that a model gives them.

    A row for each text, the most probable first: the sum of the log probabilities of its tokens in nats, which falls
    with the length, and their mean. The first token of a decoder has none unless the tokenizer puts a token before it.

    Examples: `attn score --model smollm2-135m-instruct "the cat sat" "cat the sat"`, `attn translate ... | attn score
    my-translator - --encoder-prompt "the source"`
    """
    name, given = texts_of(words, model)
    refuse_options_of_the_other(local=model is not None, connection=connection, engine=engine)
    prompts = [Prompt.of(text, encoder_prompt) for text in given]
    scores: Sequence[SequenceScore]
    if model is None:
        with connect(connection) as server:
            scores = server.score(name, prompts)
    else:
        with here(EngineConfig(dtype=engine.dtype, device=engine.device)) as local:
            scores = local.score(name, prompts)
    rows: list[dict[str, Any]] = [
        {"text": text, "nats": score.sum_logprob, "nats a token": score.sum_logprob / max(1, known(score))}
        for text, score in zip(given, scores, strict=True)
    ]
    ranked = sorted(rows, key=lambda row: -row["nats"])
    if json:
        print_json([row | {"nats_a_token": row.pop("nats a token")} for row in ranked])
        return
    print_table([{n: v if n == "text" else f"{v:.2f}" for n, v in row.items()} for row in ranked], "no text was given")


def known(score: SequenceScore) -> int:
    """The number of tokens that have a log probability."""
    return sum(token.logprob is not None for token in score.tokens)
