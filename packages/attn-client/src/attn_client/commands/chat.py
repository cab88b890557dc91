"""`attn chat`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated, cast

import typer
from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions, EngineConfig, SamplingParams
from attn_schema.flags import with_flags

from attn_client.commands.conversation import Conversation
from attn_client.commands.options import LocalWriter, ModelHere, writer_for

MAX_NEW_TOKENS = 512
"""Of an answer, if not given."""
FORGET = "/new"
LEAVE = "/bye"


@with_flags
def chat_command(
    *,
    served: Annotated[str | None, typer.Argument(metavar="[SERVED]", help="Name of a server's model.")] = None,
    model: ModelHere = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    sampling: SamplingParams,
    engine: EngineConfig,
    connection: ConnectionOptions,
) -> None:
    """Talk with a model, here without a server or, if one is named first, with a server's.

    A line is a message. Ctrl-C ends an answer, at the prompt the conversation, as Ctrl-D does; `/new` starts another.
    The options of engines are for a model that runs here. An answer has at most 512 tokens, if not given.

    Examples: `attn pull smollm2-135m-instruct`, then `attn chat`; `attn chat smollm2-135m-instruct --address HOST:PORT`
    """
    if served is not None and model is not None:
        raise InvalidValue.of("--model", model, f"either --model or a server's model ({served}), not both")
    if sampling.max_new_tokens is None:
        sampling = sampling.replace(max_new_tokens=MAX_NEW_TOKENS)
    with ExitStack() as stack:
        writer = writer_for(stack, local=served is None, connection=connection, engine=engine)
        name = served or model or cast("LocalWriter", writer).only_chat_model()
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
