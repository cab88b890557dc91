"""`attn generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Annotated

import typer
from attn_core.errors import InvalidValue
from attn_schema import (
    ChatMessage,
    ConnectionOptions,
    EncoderPrompt,
    EngineConfig,
    OutputDelta,
    Prompt,
    PromptLike,
    SamplingParams,
    Usage,
)
from attn_schema.flags import with_flags
from attn_schema.output import Json, detail, print_json

from attn_cli.commands.options import Images, ModelHere, described, read_images, writer_for

WORDS_HELP = "Name of a server's model (see `attn models list`) unless --model is given, and the prompt; - reads it."


@with_flags
def generate_command(
    *,
    words: Annotated[list[str] | None, typer.Argument(metavar="[SERVED] PROMPT", help=WORDS_HELP)] = None,
    model: ModelHere = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message, with the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message before the prompt; implies --chat.")] = None,
    image: Images = None,
    encoder_prompt: Annotated[
        str | None,
        typer.Option(
            help="What the encoder of an encoder-decoder model reads; a prompt is then how the output begins."
        ),
    ] = None,
    sampling: SamplingParams,
    engine: EngineConfig,
    timeout: Annotated[float | None, typer.Option(help="Maximum time, in seconds.")] = None,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Generate text with a server's model or, with `--model`, one that runs on this machine; output is streamed.

    Engine options apply only to a model that runs on this machine. With `--regex "(yes|no)"` the text matches that
    expression; with `--json-schema person.json` it is JSON that conforms to the schema. Examples: `attn generate
    smollm2-135m-instruct --chat "Where is Paris?"` uses a server, `attn generate --model smollm2-135m-instruct "Once"`
    needs none. With `--verbose`, the number of tokens per second is printed after the text.
    """
    name, prompt = _asked(words or [], model, encoder_prompt)
    text = sys.stdin.read() if prompt == "-" else prompt
    asked = _prompt(text, system, encoder_prompt, read_images(image or ()), chat=chat)
    with ExitStack() as stack:
        writer = writer_for(stack, local=model is not None, connection=connection, engine=engine)
        described(writer, name, sampling)
        deltas = writer.generate(name, asked, sampling, timeout=timeout)
        # Closing cancels the request, on a server too; also at Ctrl-C.
        with closing(deltas):
            timed = TimedDeltas(deltas)
            show(timed, json=json, several=sampling.n > 1)
    detail(timed.report())


class TimedDeltas:
    """Passes deltas through and measures how fast they arrive."""

    def __init__(self, deltas: Iterable[OutputDelta]) -> None:
        self._deltas = deltas
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._usage: Usage | None = None

    def __iter__(self) -> Iterator[OutputDelta]:
        for delta in self._deltas:
            if delta.tokens:
                self._last = time.perf_counter() - self._start
                self._first = self._last if self._first is None else self._first
                self._tokens += len(delta.tokens)
            self._usage = delta.usage or self._usage
            yield delta

    def report(self) -> str:
        """One line with the numbers of prompt and generated tokens, time to first token, and tokens per second."""
        prompt = f"{self._usage.prompt_tokens} prompt tokens, " if self._usage else ""
        if self._first is None:
            return f"attn: {prompt}no token generated"
        after = self._last - self._first
        rate = f", then {(self._tokens - 1) / after:.1f} tokens/s" if self._tokens > 1 and after > 0 else ""
        return f"attn: {prompt}{self._tokens} generated: the first after {self._first:.3f} s{rate}"


def _asked(words: list[str], model: str | None, encoder_prompt: str | None) -> tuple[str, str]:
    """The model and the prompt from the arguments; the prompt is optional with an encoder prompt.

    Raises `InvalidValue` for a wrong number of arguments.
    """
    if encoder_prompt is not None and len(words) == (model is None):
        words = [*words, ""]
    if model is not None and len(words) == 1:
        return model, words[0]
    if model is None and len(words) == 2:
        return words[0], words[1]
    allowed = "only a prompt after --model" if model is not None else "a server's model and a prompt, or --model"
    raise InvalidValue.of("arguments", " ".join(words), allowed)


def _prompt(
    text: str, system: str | None, encoder_prompt: str | None, images: Sequence[bytes], *, chat: bool
) -> PromptLike:
    if encoder_prompt is not None:
        if chat or images or system is not None:
            raise InvalidValue.of("--encoder-prompt", encoder_prompt, "without --chat, --system and --image")
        return Prompt(text=text, encoder_prompt=EncoderPrompt(text=encoder_prompt))
    if not chat and not images and system is None:
        return text
    messages = [ChatMessage(role="system", content=system)] if system is not None else []
    return [*messages, ChatMessage(role="user", content=text, images=tuple(images))]


def show(deltas: Iterable[OutputDelta], *, json: bool, several: bool) -> None:
    """Print a completion as it is generated, or each of several when it is complete; as JSON, each delta on arrival."""
    if json:
        for delta in deltas:
            print_json(delta)
    elif several:
        _show_whole(deltas)
    else:
        for delta in deltas:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
        typer.echo()


def _show_whole(deltas: Iterable[OutputDelta]) -> None:
    """Print completions that are generated concurrently, each when it is complete, under its number."""
    texts: dict[int, str] = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + delta.text
        if delta.finish_reason is not None:
            typer.echo(f"--- {delta.index}\n{texts.pop(delta.index)}")
