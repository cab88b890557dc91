"""`attn translate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue

from attn_client.bleu import Bleu, corpus_bleu
from attn_client.commands.options import ADDRESS, Address, Certificates, Json, TokenFile, connect, print_line
from attn_client.commands.place import here
from attn_client.results.inference import Completion
from attn_client.sampling import Beams, Sampling, Sourced
from attn_client.writer import Writer

Option = typer.Option
AT_ONCE = 32
"""Sentences asked for side by side: what fills a batch, and what a small server takes."""


def translate_command(  # noqa: PLR0913 - a command has the options it has
    *,
    words: Annotated[list[str], typer.Argument(metavar="[SERVED] TEXT", help="A server's model, and a text; - reads.")],
    model: Annotated[str | None, Option("--model", "-m", help="Model to run here: a trained one, or a folder.")] = None,
    references: Annotated[
        Path | None, Option(help="File with a translation for each line; measures the BLEU of ours.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option("--max-new-tokens", "-n", help="Most tokens of a sentence.")] = None,
    beams: Annotated[int, Option(help="Search with so many beams for the likeliest; 1 takes each likeliest word.")] = 1,
    length_penalty: Annotated[float, Option(help="With --beams: above 0 favours long texts, below 0 short.")] = 1.0,
    json: Json = False,
    address: Address = ADDRESS,
    token_file: TokenFile = None,
    certificates: Certificates = None,
) -> None:
    """Translate each line of a text with a model that reads a source, such as RNNsearch.

    Examples: `attn translate my-job "a dog runs"` asks a server, `attn translate --model my-job --beams 5 - < test.en`
    needs none and `--references test.de` measures it, which needs sacrebleu: `pip install "attn-client[bleu]"`.
    """
    name, text = _asked(words, model)
    sampling = _sampling(max_new_tokens, beams, length_penalty)
    lines = (sys.stdin.read() if text == "-" else text).splitlines()
    wanted = None if references is None else _references(references, len(lines))
    with ExitStack() as stack:
        served = connect(address, token_file, certificates) if model is None else None
        writer: Writer = stack.enter_context(served or here())
        found = []
        for source, translation in zip(lines, translations(writer, name, lines, sampling), strict=True):
            found.append(translation)
            if json:
                print_line({"source": source, "translation": translation})
            else:
                typer.echo(translation)
    if wanted is not None:
        _tell(corpus_bleu(found, wanted), json=json)


def translations(writer: Writer, model: str, lines: Sequence[str], sampling: Sampling) -> Iterator[str]:
    """The translation of each line, in order; empty lines stay empty."""

    def translate(line: str) -> str:
        if not line.strip():
            return ""
        return Completion.of(list(writer.generate(model, Sourced(line.strip()), sampling))).text.strip()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(translate, lines)


def _sampling(most: int | None, beams: int, length_penalty: float) -> Sampling:
    if beams == 1:
        return Sampling(temperature=0.0, max_new_tokens=most)
    return Sampling(max_new_tokens=most, beams=Beams(width=beams, length_penalty=length_penalty))


def _asked(words: Sequence[str], model: str | None) -> tuple[str, str]:
    given = ([model] if model is not None else []) + list(words)
    if len(given) != 2:
        raise InvalidValue.of("arguments", " ".join(words), "a server's model and a text, or --model and a text")
    return given[0], given[1]


def _references(path: Path, lines: int) -> list[str]:
    try:
        found = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue.of("--references", str(path), f"a text file that can be read ({error})") from error
    if len(found) != lines:
        raise InvalidValue.of("--references", f"{len(found)} lines", f"as many as the {lines} lines to translate")
    return found


def _tell(bleu: Bleu, *, json: bool) -> None:
    if json:
        print_line({"bleu": bleu.score, "signature": bleu.signature})
    else:
        typer.echo(f"BLEU {bleu.score:.2f} ({bleu.signature})", err=True)
