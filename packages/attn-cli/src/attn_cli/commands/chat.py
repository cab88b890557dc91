"""`attn chat`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, cast

import typer
from attn_core.errors import InvalidValue
from attn_schema import ChatMessage, ConnectionOptions, EngineConfig, SamplingParams
from attn_schema.flags import with_flags
from attn_schema.output import note, print_table
from attn_schema.schema import Checked
from attn_schema.text_client import TextClient
from msgspec import Meta

from attn_cli.commands.conversation import Conversation
from attn_cli.commands.options import Images, LocalClient, ModelHere, described, read_images, writer_for
from attn_cli.conversations import FORMAT, ConversationStore, KeptConversation, KeptTurn

MAX_NEW_TOKENS = 512
"""The default maximum number of tokens in an answer."""
FORGET = "/new"
LEAVE = "/bye"
SHOW = "/image "


class KeptOptions(Checked, frozen=True, kw_only=True):
    """The options of `attn chat` for saved conversations."""

    resume: Annotated[str | None, Meta(description="Continue a saved conversation: its id, or `last`.")] = None
    list: Annotated[bool, Meta(description="List the saved conversations and their folder.")] = False
    no_save: Annotated[bool, Meta(description="Do not save this conversation.")] = False


class Keeper:
    """Saves the conversation after every answer, under its existing id or a new one."""

    def __init__(self, store: ConversationStore, model: str, name: str | None, *, served: bool) -> None:
        self._store, self._model, self._served = store, model, served
        self._name = name
        self._started = store.read(name).started if name else ""

    def keep(self, messages: list[ChatMessage]) -> None:
        """Save all messages; an error of the disk is reported and does not end the conversation."""
        if self._name is None:
            self._name = self._store.new_id()
            self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        turns = [KeptTurn(role=each.role, content=each.content, images=each.images) for each in messages]
        kept = KeptConversation(
            format=FORMAT, model=self._model, served=self._served, started=self._started, messages=turns
        )
        try:
            self._store.write(self._name, kept)
        except OSError as error:
            typer.echo(f"attn: the conversation is not kept: {error.strerror} ({self._store.folder})", err=True)

    def begin_anew(self) -> None:
        """Save what follows as a new conversation."""
        self._name = None


@with_flags
def chat_command(
    *,
    served: Annotated[str | None, typer.Argument(metavar="SERVED", help="Name of a server's model.")] = None,
    model: ModelHere = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    image: Images = None,
    kept: KeptOptions,
    sampling: SamplingParams,
    engine: EngineConfig,
    connection: ConnectionOptions,
) -> None:
    """Chat with a model: one that runs on this machine without a server or, if SERVED is given, a server's model.

    Each line is a message. Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the conversation; `/new` starts
    another; `/image FILE` adds an image to the next message, for vision-language models; `--image` to the first.
    Conversations are saved in $ATTN_HOME/conversations, readable only by you; `--resume` continues one.
    Engine options apply only to a model that runs on this machine. By default an answer has at most 512 tokens.

    Examples: `attn pull smollm2-135m-instruct`, then `attn chat`; `attn chat MODEL --address HOST:PORT`;
    `attn chat --list`, then `attn chat --resume last`
    """
    store = ConversationStore()
    if kept.list:
        _print_list(store)
        return
    if served is not None and model is not None:
        raise InvalidValue.of("--model", model, f"either --model or a server's model ({served}), not both")
    images = read_images(image or ())  # before the model is loaded, so that an unreadable file is reported at once
    before: list[ChatMessage] = []
    name = None
    if kept.resume is not None:
        name = store.find(kept.resume)
        earlier = store.read(name)
        before = store.messages(earlier)
        if system is not None:
            raise InvalidValue.of("--system", system, "nothing with --resume: the conversation has its own")
        if served is None and model is None:
            served, model = (earlier.model, None) if earlier.served else (None, earlier.model)
    elif system:
        before = [ChatMessage(role="system", content=system)]
    with ExitStack() as stack:
        writer = writer_for(stack, local=served is None, connection=connection, engine=engine)
        chosen = served or model or cast("LocalClient", writer).only_chat_model()
        keeper = None if kept.no_save else Keeper(store, chosen, name, served=served is not None)
        talk(writer, chosen, sampling, before, keeper, images=images)


def _print_list(store: ConversationStore) -> None:
    rows = [
        {"id": found.id, "model": found.model, "answers": str(found.answers), "begins": found.begins}
        for found in store.listed()
    ]
    print_table(rows, "no conversation is kept yet")
    note(f"in {store.folder}")


def talk(
    writer: TextClient,
    name: str,
    sampling: SamplingParams,
    before: Sequence[ChatMessage],
    keeper: Keeper | None,
    *,
    images: Sequence[bytes] = (),
) -> None:
    """Read messages from standard input and write answers until the input ends; with `keeper` None, nothing is saved.

    `images`, the bytes of image files, are attached to the first message.
    """
    if sampling.max_new_tokens is None:
        sampling = sampling.replace(max_new_tokens=MAX_NEW_TOKENS)
    described(writer, name, sampling, chat=True)
    conversation = Conversation(writer, name, sampling, before, keeper.keep if keeper else None)
    person = sys.stdin.isatty()
    if person:
        with suppress(ModuleNotFoundError):  # Windows edits lines itself
            import readline  # noqa: F401  (importing it gives input() editing and history)

        note(f"{name}: {FORGET} begins anew, {LEAVE} or Ctrl-D ends, Ctrl-C ends an answer")
    shown = list(images)
    while (line := _read(person)) is not None and line.strip() != LEAVE:
        if line.startswith(SHOW):
            shown += _shown(line.removeprefix(SHOW).strip())
        elif line.strip() == FORGET:
            shown.clear()
            conversation.forget()
            if keeper is not None:
                keeper.begin_anew()
        elif (command := re.match(r"/\w+(?=\s|$)", line)) is not None:
            known = f"{FORGET}, {LEAVE}, {SHOW}FILE"
            typer.echo(f"attn: unknown command {command[0]!r}; known: {known}; a message begins with a space", err=True)
        elif line.strip():
            conversation.answer(line, _write, shown)
            shown.clear()
            typer.echo()


def _shown(path: str) -> list[bytes]:
    """Read an image file; if it cannot be read, report that and return an empty list."""
    try:
        return read_images([Path(path).expanduser()])
    except InvalidValue as error:
        typer.echo(f"attn: {error.message}", err=True)
        return []


def _write(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _read(person: bool) -> str | None:
    """Read the next line; None at the end of the input."""
    try:
        return input("> ") if person else (sys.stdin.readline() or None)
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None
