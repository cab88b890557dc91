"""`attn translate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue, MissingPackage
from attn_schema import ConnectionOptions, EncoderPrompt, EngineConfig, Prompt, SamplingParams
from attn_schema.flags import with_flags
from attn_schema.output import Json, note, print_json
from attn_schema.text_client import TextClient
from attn_schema.text_files import lines_of, lines_of_input, read_text

from attn_cli.commands.options import writer_for
from attn_cli.pages import AttentionPage

Option = typer.Option
NAMED = 10
"""The maximum number of unknown words that are listed."""
AT_ONCE = 32
"""The number of concurrent requests: enough to fill a batch, and accepted by a small server."""


@with_flags
def translate_command(
    *,
    words: Annotated[list[str], typer.Argument(metavar="[SERVED] TEXT", help="A server's model, and a text; - reads.")],
    model: Annotated[
        str | None, Option("--model", "-m", help="Model to run locally: a trained one, or a folder.")
    ] = None,
    references: Annotated[
        Path | None, Option(help="File with a reference translation for each line, to measure BLEU.")
    ] = None,
    picture: Annotated[
        Path | None,
        Option("--map", metavar="FILE", help="Draw which words of the only line each word looks at: .png or .html."),
    ] = None,
    sampling: SamplingParams,
    engine: EngineConfig,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Translate each line of a text with an encoder-decoder model, such as RNNsearch.

    Examples: `attn translate my-job "a dog runs"` uses a server, `attn translate --model my-job --num-beams 5 - <
    test.en` needs none. `--references test.de` measures BLEU with sacrebleu: `pip install "attn-cli[bleu]"`. `--map
    translation.html` writes the attention explorer, and `--map translation.png` draws the heads of the last layer.
    """
    name, text = _asked(words, model)
    lines = lines_of_input() if text == "-" else lines_of(text)
    wanted = None if references is None else _references(references, len(lines))
    if picture is not None and len(lines) != 1:
        raise InvalidValue.of("--map", f"{len(lines)} lines", "one line to translate")
    with ExitStack() as stack:
        writer = writer_for(stack, local=model is not None, connection=connection, engine=engine)
        found: list[str] = []
        for source, translation in zip(lines, translations(writer, name, lines, sampling), strict=True):
            found.append(translation)
            if json:
                print_json({"source": source, "translation": translation})
            else:
                typer.echo(translation)
        unknown = unknown_words(writer, name, lines)
        if picture is not None:
            _draw(writer, name, Prompt.of(found[0], lines[0].strip()), picture)
    if unknown:
        said = ", ".join(map(repr, unknown[:NAMED])) + (" and others" if len(unknown) > NAMED else "")
        note(f"attn: words that {name} does not know, and reads as one and the same: {said}")
    if wanted is not None:
        _tell(found, wanted, json=json)


def translations(writer: TextClient, model: str, lines: Sequence[str], sampling: SamplingParams) -> Iterator[str]:
    """The translation of each line, in order; empty lines stay empty."""

    def translate(line: str) -> str:
        if not line.strip():
            return ""
        prompt = Prompt(text="", encoder_prompt=EncoderPrompt(text=line.strip()))
        return writer.complete(model, prompt, sampling).text.strip()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(translate, lines)


def unknown_words(writer: TextClient, model: str, lines: Sequence[str]) -> list[str]:
    """The words in the lines for which the model's vocabulary has no token, each once."""

    def look_up(line: str) -> tuple[str, ...]:
        return writer.tokenize(model, Prompt(text="", encoder_prompt=EncoderPrompt(text=line))).unknown

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(look_up, filter(None, map(str.strip, lines)))
        return list(dict.fromkeys(word for words in found for word in words))


def _asked(words: Sequence[str], model: str | None) -> tuple[str, str]:
    given = ([model] if model is not None else []) + list(words)
    if len(given) != 2:
        raise InvalidValue.of("arguments", " ".join(words), "a server's model and a text, or --model and a text")
    return given[0], given[1]


def _references(path: Path, lines: int) -> list[str]:
    found = lines_of(read_text(path, "--references"))
    if len(found) != lines:
        raise InvalidValue.of("--references", f"{len(found)} lines", f"as many as the {lines} lines to translate")
    return found


def _draw(writer: TextClient, name: str, translation: Prompt, path: Path) -> None:
    """Write the explorer of a translation, or a picture of its last layer."""
    maps = writer.attention_maps(name, translation)
    if path.suffix == ".html":
        AttentionPage([(name, maps)]).save(path)
    else:
        from attn_schema.drawing import draw

        draw(maps[-1], name, path)
    note(f"attention: {path.resolve()}")


def _tell(translations: Sequence[str], references: Sequence[str], *, json: bool) -> None:
    """Print BLEU (Papineni et al. 2002) as sacreBLEU computes it, and its signature; raises `MissingPackage`."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingPackage.of("attn-cli[bleu]", "measuring BLEU") from error
    metric = BLEU()
    score = float(metric.corpus_score(list(translations), [list(references)]).score)
    signature = str(metric.get_signature())
    if json:
        print_json({"bleu": score, "signature": signature})
    else:
        typer.echo(f"BLEU {score:.2f} ({signature})", err=True)
