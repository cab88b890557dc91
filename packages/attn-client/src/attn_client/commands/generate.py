"""`attn generate`."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue

from attn_client.commands.options import ADDRESS, Address, Certificates, Json, TokenFile, Weights, connect
from attn_client.commands.place import here
from attn_client.commands.show import show
from attn_client.sampling import Beams, ChatMessage, Grammar, Prompt, Sampling, Sourced
from attn_client.writer import Writer

Option = typer.Option
WORDS_HELP = "Name of a server's model (see `attn models list`) unless --model is given, and the prompt; - reads it."


def generate_command(  # noqa: PLR0913 - a command has the options it has
    *,
    words: Annotated[list[str] | None, typer.Argument(metavar="[SERVED] PROMPT", help=WORDS_HELP)] = None,
    model: Annotated[str | None, Option("--model", "-m", help="Model to run here: a pulled one, or a folder.")] = None,
    chat: Annotated[
        bool, Option("--chat", help="Take the prompt as a user's turn, by the model's chat template.")
    ] = False,
    system: Annotated[str | None, Option(help="System message before the prompt; means --chat.")] = None,
    source: Annotated[
        str | None, Option(help="What a model with a source reads; a prompt is then how the answer begins.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option("--max-new-tokens", "-n", help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Keep the likeliest tokens up to this probability.")] = None,
    min_p: Annotated[float | None, Option(help="Keep tokens this fraction as likely as the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="More than 1 avoids tokens already seen.")] = None,
    seed: Annotated[int | None, Option(help="Make the choice repeatable.")] = None,
    typical_p: Annotated[float | None, Option(help="Keep tokens of typical surprise up to this probability.")] = None,
    completions: Annotated[int, Option("--completions", help="How many to write; each has a seed of its own.")] = 1,
    beams: Annotated[int | None, Option(help="Search with so many beams for the likeliest; draw nothing.")] = None,
    length_penalty: Annotated[float, Option(help="With --beams: above 0 favours long texts, below 0 short.")] = 1.0,
    guesses: Annotated[int | None, Option(help="Most tokens to guess ahead at a step; changes only the time.")] = None,
    draft: Annotated[str | None, Option(help="With --model, a smaller model of the same tokens that guesses.")] = None,
    branches: Annotated[int | None, Option(help="With --model, in how many ways a guess may go on, as a tree.")] = None,
    weights: Weights = None,
    min_new_tokens: Annotated[int | None, Option(help="Do not end before so many tokens.")] = None,
    stop: Annotated[list[str] | None, Option(help="End at this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    top_logprobs: Annotated[int | None, Option(help="With --json, the likeliest tokens at each place.")] = None,
    frequency_penalty: Annotated[float | None, Option(help="Lower a token each time it was generated.")] = None,
    presence_penalty: Annotated[float | None, Option(help="Lower a token that was generated.")] = None,
    json_schema: Annotated[
        Path | None, Option(metavar="FILE", help="Write JSON that this schema allows, and nothing else.")
    ] = None,
    regex: Annotated[str | None, Option(help="Write what this regular expression matches, and nothing else.")] = None,
    lark: Annotated[Path | None, Option(metavar="FILE", help="Write what this Lark grammar describes.")] = None,
    timeout: Annotated[float | None, Option(help="Most seconds it may take.")] = None,
    json: Json = False,
    address: Address = ADDRESS,
    token_file: TokenFile = None,
    certificates: Certificates = None,
) -> None:
    """Let a model write: a server's, or with `--model` one that runs here; the text appears as it is made.

    Examples: `attn generate smollm2-135m-instruct --chat "Where is Paris?"` asks a server, `attn generate --model
    smollm2-135m-instruct "Once"` needs none. With `--regex "(yes|no)"` it says nothing else, with `--json-schema
    person.json` only JSON of that form.
    """
    name, prompt = _asked(words or [], model, source)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        completions=completions,
        guesses=guesses,
        beams=None if beams is None else Beams(width=beams, length_penalty=length_penalty),
        repetition_penalty=repetition_penalty,
        seed=seed,
        min_new_tokens=min_new_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        top_logprobs=top_logprobs,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        grammar=_grammar(json_schema, regex, lark),
    )
    with ExitStack() as stack:
        writer: Writer
        if model is None:
            for option, value in (("--draft", draft), ("--weights", weights), ("--branches", branches)):
                if value is not None:
                    raise InvalidValue.of(
                        option, value, f"only with --model; a server has its own: attn serve {option}"
                    )
            writer = stack.enter_context(connect(address, token_file, certificates))
        else:
            local = writer = stack.enter_context(here())
            if weights is not None:
                local.keep(weights)
            if branches is not None:
                local.guess(branches)
            if draft is not None:
                local.draft(model, draft)
        chunks = writer.generate(name, _prompt(text, system, source, chat=chat), sampling, timeout=timeout)
        # Closing cancels, also on a server, also at Ctrl-C.
        with closing(chunks):
            show(chunks, json=json, several=completions > 1)


def _asked(words: list[str], model: str | None, source: str | None) -> tuple[str, str]:
    """The model and the prompt, which may be left out with a source; raises `InvalidValue` for other words."""
    if source is not None and len(words) == (model is None):
        words = [*words, ""]
    if model is not None and len(words) == 1:
        return model, words[0]
    if model is None and len(words) == 2:
        return words[0], words[1]
    allowed = "only a prompt after --model" if model is not None else "a server's model and a prompt, or --model"
    raise InvalidValue.of("arguments", " ".join(words), allowed)


def _grammar(json_schema: Path | None, regex: str | None, lark: Path | None) -> Grammar | None:
    """What was asked for; raises `InvalidValue` for more than one, or a file that cannot be read."""
    grammar = Grammar(json_schema=_read("--json-schema", json_schema), regex=regex, lark=_read("--lark", lark))
    return None if grammar == Grammar() else grammar


def _read(option: str, path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue.of(option, str(path), f"a text file that can be read ({error})") from error


def _prompt(text: str, system: str | None, source: str | None, *, chat: bool) -> Prompt:
    if source is not None:
        if chat or system is not None:
            raise InvalidValue.of("--source", source, "without --chat and --system")
        return Sourced(source, text)
    if system is not None:
        return [ChatMessage("system", system), ChatMessage("user", text)]
    return [ChatMessage("user", text)] if chat else text
