"""`attn chat`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

import typer
from attn_core.errors import InvalidValue

from attn_client.commands.conversation import Conversation
from attn_client.commands.options import ADDRESS, Address, Certificates, TokenFile, Weights, connect
from attn_client.commands.place import here
from attn_client.sampling import Sampling
from attn_client.writer import Writer

NEW_TOKENS = 512
FORGET = "/new"
LEAVE = "/bye"
Option = typer.Option


def chat_command(  # noqa: PLR0913 - a command has the options it has
    *,
    served: Annotated[str | None, typer.Argument(metavar="[SERVED]", help="Name of a server's model.")] = None,
    model: Annotated[str | None, Option("--model", "-m", help="Model to run here: a pulled one, or a folder.")] = None,
    system: Annotated[str | None, Option(help="System message before the conversation.")] = None,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Most tokens of an answer.")] = NEW_TOKENS,
    temperature: Annotated[float | None, Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Keep the likeliest tokens up to this probability.")] = None,
    min_p: Annotated[float | None, Option(help="Keep tokens this fraction as likely as the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="More than 1 avoids tokens already seen.")] = None,
    seed: Annotated[int | None, Option(help="Make the choice repeatable.")] = None,
    weights: Weights = None,
    address: Address = ADDRESS,
    token_file: TokenFile = None,
    certificates: Certificates = None,
) -> None:
    """Talk with a model, here without a server or, where one is named first, with a server's.

    A line is a turn. Ctrl-C ends an answer, at the prompt the conversation, as Ctrl-D does; `/new` forgets it.

    Examples: `attn pull smollm2-135m-instruct`, then `attn chat`; `attn chat smollm2-135m-instruct --address HOST:PORT`
    """
    if served is not None and model is not None:
        raise InvalidValue.of("--model", model, f"either --model or a server's model ({served}), not both")
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    with ExitStack() as stack:
        writer: Writer
        if served is not None:
            if weights is not None:
                raise InvalidValue.of(
                    "--weights", weights, "only without a server; it has its own: attn serve --weights"
                )
            name, writer = served, stack.enter_context(connect(address, token_file, certificates))
        else:
            local = stack.enter_context(here())
            if weights is not None:
                local.keep(weights)
            name, writer = model or local.only_chat_model(), local
        _talk(Conversation(writer, name, sampling, system), name)


def _talk(conversation: Conversation, name: str) -> None:
    person = sys.stdin.isatty()
    if person:
        import readline  # noqa: F401  (importing it gives input() editing and history)

        typer.echo(f"{name}: {FORGET} begins anew, {LEAVE} or Ctrl-D ends, Ctrl-C ends an answer", err=True)
    while (line := _read(person)) is not None and line.strip() != LEAVE:
        if line.strip() == FORGET:
            conversation.forget()
        elif line.strip():
            conversation.answer(line, _write)
            typer.echo()


def _write(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _read(person: bool) -> str | None:  # noqa: FBT001  (whether a terminal is at the other end)
    """The next line, None at the end."""
    try:
        return input("> ") if person else (sys.stdin.readline() or None)
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None
